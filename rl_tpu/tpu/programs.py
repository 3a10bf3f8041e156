"""The programs of a run's trainer, compiled for the devices that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.compose import cache_directory
from rl_tpu.config.schema import ExecutionConfig, ParallelConfig, RunConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.devices.generations import get_generation
from rl_tpu.tpu.report import CompiledProgram


@dataclass(frozen=True)
class Wanted:
    """A program and the shape of its rows on one data rank; the update has none."""

    name: str
    rows: int = 0
    row_tokens: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.row_tokens is None else f"{self.name} {self.rows}x{self.row_tokens}"


def step_programs(config: RunConfig) -> list[Wanted]:
    """What one step of this run computes, for every row length."""
    from rl_tpu.trainer.packing import rows_per_microbatch

    names = ["backward"]
    if config.algorithm.old_logprobs == "recompute":
        names.append("logprobs")
    if config.algorithm.kl.coefficient:
        names.append("reference")
    over_rows = [
        Wanted(name, rows_per_microbatch(tokens, config.trainer.microbatch_tokens), tokens)
        for tokens in config.trainer.row_tokens
        for name in names
    ]
    return [*over_rows, Wanted("update")]


def wanted_programs(config: RunConfig) -> list[Wanted]:
    """Those of `step_programs` that `preflight.only` asks for; all where it asks for none."""
    only = config.preflight.only
    return [each for each in step_programs(config) if not only or each.name in only]


def compile_programs(
    config: RunConfig, model_dir: Path, *, topology: str, progress: Callable[[str], None]
) -> list[CompiledProgram]:
    """Every program of `wanted_programs`, compiled for `topology` and divided over the trainer's ranks.

    They are those of `trainer.execution.mode=graph`.

    model_dir  holds the model's config.json; weights are not needed
    progress   is told what is being done

    Raises UserError where a package is missing, or the model cannot be divided so.
    """
    from rl_tpu.tpu.torch_tpu import check_versions

    check_versions()
    from rl_tpu.tpu.compile import TpuCompiler

    cache = Path(config.preflight.cache or f"{cache_directory()}/preflight").expanduser()
    generation = get_generation(topology.partition(":")[0])
    compiler = TpuCompiler(topology, generation, config.trainer_ranks, config.trainer.parallel.tensor, cache)
    found = []
    with meta_programs(config, model_dir) as programs:
        capture = {
            "backward": partial(programs.backward, reference=config.algorithm.kl.coefficient > 0),
            "logprobs": programs.logprobs,
            "reference": partial(programs.logprobs, frozen=True),
        }
        for wanted in wanted_programs(config):
            progress(f"{wanted.label}: lowering and compiling")
            if wanted.row_tokens is None:
                program = programs.update()
            else:
                program = capture[wanted.name](compiler.partition.rows(wanted.rows), wanted.row_tokens)
            result = compiler.compile(program, programs.layout, wanted.rows * config.data_ranks, wanted.row_tokens)
            progress(f"{wanted.label}: {'from the cache' if result.cached else f'{result.compile_s:.0f} s'}")
            found.append(result)
    return found


@contextmanager
def meta_programs(config: RunConfig, model_dir: Path) -> Iterator:
    """The run's programs, of a model without memory and, for the time being, without other ranks."""
    device = get_device("cpu")  # of torch, where captures are made
    prepare_torchtitan(device)
    from rl_tpu.trainer import process_group
    from rl_tpu.trainer.graph.programs import Programs
    from rl_tpu.trainer.model import build_policy

    alone = {"parallel": ParallelConfig(), "execution": ExecutionConfig(mode="graph")}
    trainer, rollout = config.trainer.model_copy(update=alone), config.rollout
    process_group.join(device, timeout_s=60.0)
    try:
        policy = build_policy(model_dir, device, torch.device("meta"), trainer)
        distribution = Distribution(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        yield Programs(policy, trainer, config.algorithm, distribution)
    finally:
        process_group.leave()
