"""If it does not fit: the settings that could mend it, tried in turn, and what the compiler says with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.preflight.memory import Memory

MAX_TRIES = 2
"""Compiling takes minutes."""
STATIC_SHARES = (0.85, 0.9)
"""Larger shares of a rollout device for weights and key-value cache."""

Assess = Callable[[Sequence[str]], Memory]
"""The verdict with further overrides on the command line. It compiles what changed."""


@dataclass(frozen=True)
class Advice:
    """One change that was tried."""

    side: str
    """`trainer` or `rollout`."""
    overrides: tuple[str, ...]
    fits: bool
    """Whether that side fits with it."""
    before: str
    """What it needed, in the compiler's figures where they are the compiler's."""
    after: str


def advise(config: RunConfig, memory: Memory, assess_trainer: Assess, assess_rollout: Assess) -> list[Advice]:
    """What was tried for every side that does not fit: at most two changes each, the second one on top of the first.

    Each is verified by asking for the verdict with it. `assess_rollout` need not compile anything. Nothing is tried for a
    program that the compiler refuses for another reason than memory.
    """
    found = []
    refused = any(program.is_refused for program in memory.trainer)
    if not refused and not all(program.fits for program in memory.trainer):
        candidates = trainer_candidates(config, memory)
        found += _tries("trainer", candidates, assess_trainer, trainer_need, memory)
    if not memory.rollout.fits:
        found += _tries("rollout", rollout_candidates(config), assess_rollout, rollout_need, memory)
    return found


def trainer_candidates(config: RunConfig, memory: Memory) -> Iterator[str]:
    """Overrides in the order of what they usually give. What makes only activations smaller is left out where the state
    alone is too large; so is trainer.activation_checkpointing, for the compiled programs compute every block again anyway."""
    trainer, worst = config.trainer, memory.worst
    state = sum(size for name, size in worst.parts.items() if name != "activations")
    if state < worst.limit:
        if trainer.kernels.attention == "plain":
            yield "trainer.kernels.attention=splash"
        if trainer.kernels.head == "plain":
            yield "trainer.kernels.head=fused"
        if trainer.microbatch_tokens is not None and trainer.microbatch_tokens >= 2 * min(trainer.row_tokens):
            yield "trainer.microbatch_tokens=null"
        if max(trainer.row_tokens) > config.max_sample_tokens:
            shorter = sorted({min(tokens, config.max_sample_tokens) for tokens in trainer.row_tokens})
            yield f"trainer.row_tokens=[{','.join(map(str, shorter))}]"
    if memory.sizes.reference and not trainer.offload_reference and trainer.execution.mode != "graph":
        yield "trainer.offload_reference=true"
    if trainer.optimizer.name == "adamw":
        yield "trainer.optimizer.name=muon"
    yield from _more_trainer_chips(config)


def rollout_candidates(config: RunConfig) -> Iterator[str]:
    """Overrides that leave more room for the key-value cache."""
    rollout = config.rollout
    share = rollout.server_options.get("mem_fraction_static", 0.0)
    for larger in STATIC_SHARES:
        if share < larger:
            yield f"++rollout.server_options.mem_fraction_static={larger}"
            break
    if rollout.engines % 2 == 0:
        yield f"rollout.engines={rollout.engines // 2} rollout.tensor_parallel={2 * rollout.tensor_parallel}"
    responses = [each.max_response_tokens or 0 for each in config.evaluation.sets.values()]
    longest = config.data.max_prompt_tokens + max([rollout.max_response_tokens, *responses])
    if longest < rollout.context_tokens:
        yield f"rollout.context_tokens={longest}"


def trainer_need(memory: Memory) -> str:
    """The worst program, in the compiler's words."""
    worst = memory.worst
    if worst.peak is None:
        return f"{worst.program}: {worst.error}"
    return f"{worst.program} needs {gib(worst.peak)} of {gib(worst.limit)}"


def rollout_need(memory: Memory) -> str:
    rollout = memory.rollout
    return f"{rollout.kv_tokens:,} tokens of key-value cache, one sample may need {rollout.context_tokens:,}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _more_trainer_chips(config: RunConfig) -> Iterator[str]:
    """Chips that nobody has, as many again as the trainer has now."""
    cluster = config.cluster
    free = cluster.hosts * cluster.chips_per_host - cluster.trainer_chips - cluster.rollout_chips
    if free >= cluster.trainer_chips:
        yield f"cluster.trainer_chips={2 * cluster.trainer_chips}"


def _tries(
    side: str, candidates: Iterable[str], assess: Assess, need: Callable[[Memory], str], memory: Memory
) -> Iterator[Advice]:
    overrides: tuple[str, ...] = ()
    for candidate in islice(candidates, MAX_TRIES):
        overrides = (*overrides, *candidate.split())
        try:
            after = assess(overrides)
        except UserError as error:  # settings that exclude each other
            yield Advice(side, overrides, False, need(memory), str(error))
            continue
        fits = after.rollout.fits if side == "rollout" else all(program.fits for program in after.trainer)
        yield Advice(side, overrides, fits, need(memory), need(after))
        if fits:
            return
