"""The verdict: what a trainer device and a rollout device have to hold, and whether it fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.orchestrator.preflight.model import ModelSizes
from rl_tpu.tpu.report import CompiledProgram

STATIC_SHARE = 0.8
"""Share of a device's memory for weights and key-value cache where neither the run nor the device says it. (SGLang decides
by what it measures then.)"""
HELD = {
    "logprobs": ("weights", "moments", "reference"),
    "reference": ("weights", "moments", "reference"),
    "backward": ("weights", "gradients", "moments", "reference"),
    "update": ("weights", "gradients", "moments", "reference"),
}
"""What of the run's state exists while a program runs."""
TAKEN = {
    "logprobs": ("weights",),
    "reference": ("reference",),
    "backward": ("weights", "gradients"),
    "update": ("weights", "gradients", "moments"),
}
"""The part of that state which is among the program's arguments or outputs, so the compiler has counted it already."""


@dataclass(frozen=True)
class ProgramMemory:
    """One trainer device while one program runs; bytes."""

    program: str
    error: str | None
    parts: dict[str, int]
    """Weights, gradients, moments and reference policy as they exist then, and `activations`: all that the program needs
    besides (temporaries, inputs, outputs that take no argument's place)."""
    peak: int | None
    """All together; None where the program did not compile."""
    limit: int

    @property
    def fits(self) -> bool:
        return self.peak is not None and self.peak <= self.limit

    @property
    def is_refused(self) -> bool:
        """It did not compile, and not for want of memory."""
        return self.error is not None and not re.search(r"hbm|memory|resource_exhausted", self.error, re.IGNORECASE)


@dataclass(frozen=True)
class RolloutMemory:
    """One rollout device; bytes and tokens."""

    weights: int
    kv_bytes_per_token: int
    static_share: float
    static_share_is_assumed: bool
    limit: int
    """Memory of the device."""
    kv_tokens: int
    """Tokens of key-value cache beside the weights, at most `rollout.kv_cache_tokens`. One engine has so many, however many
    devices it has: each holds its heads of every token."""
    context_tokens: int
    wanted_tokens: int
    """For `max_running_requests` samples that are half of `context_tokens` long on average."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def fits(self) -> bool:
        """At least one sample of the full context."""
        return self.kv_tokens >= self.context_tokens

    @property
    def requests(self) -> int:
        """Samples of half the context that fit at the same time."""
        return self.kv_tokens // (self.context_tokens // 2 or 1)


@dataclass(frozen=True)
class Memory:
    """The whole placement."""

    sizes: ModelSizes
    trainer: list[ProgramMemory]
    """One for each program."""
    rollout: RolloutMemory

    @property
    def worst(self) -> ProgramMemory | None:
        """The program with the highest peak, or one that did not compile."""
        return max(self.trainer, key=lambda each: each.peak if each.peak is not None else float("inf"), default=None)

    @property
    def fits(self) -> bool:
        return bool(self.trainer) and all(each.fits for each in self.trainer) and self.rollout.fits

    def to_json(self) -> dict[str, Any]:
        rollout = self.rollout
        return {
            "fits": self.fits,
            "sizes": asdict(self.sizes),
            "trainer": [asdict(each) | {"fits": each.fits} for each in self.trainer],
            "rollout": asdict(rollout)
            | {"kv_bytes": rollout.kv_bytes, "requests": rollout.requests, "fits": rollout.fits},
        }


def assess(config: RunConfig, sizes: ModelSizes, programs: Sequence[CompiledProgram], device_bytes: int) -> Memory:
    """Put the compiler's figures and the state of the run together. `device_bytes` is the memory of one device."""
    return Memory(
        sizes, [trainer_memory(sizes, program) for program in programs], rollout_memory(config, sizes, device_bytes)
    )


def trainer_memory(sizes: ModelSizes, program: CompiledProgram) -> ProgramMemory:
    """The program's own total, and what of the run's state exists beside it."""
    state = {name: getattr(sizes, name) for name in ("weights", "gradients", "moments", "reference")}
    if sizes.reference_on_host:
        state["reference"] = 0
    parts = {name: state[name] for name in HELD[program.name]}
    if program.error is not None or program.total_bytes is None:
        return ProgramMemory(program.label, program.error or "no figures", parts, None, program.limit_bytes)
    beside = sum(size for name, size in parts.items() if name not in TAKEN[program.name])
    peak = program.total_bytes + beside
    parts["activations"] = max(0, peak - sum(parts.values()))
    return ProgramMemory(program.label, None, parts, peak, program.limit_bytes)


def rollout_memory(config: RunConfig, sizes: ModelSizes, device_bytes: int) -> RolloutMemory:
    rollout = config.rollout
    of_device = get_device(config.cluster.device).engine_options(
        context_tokens=rollout.context_tokens, max_requests=rollout.max_running_requests
    )
    share = (of_device | rollout.server_options).get("mem_fraction_static")
    assumed = share is None
    share = STATIC_SHARE if assumed else float(share)
    tokens = max(0, int(share * device_bytes - sizes.engine_weights) // sizes.kv_bytes_per_token)
    return RolloutMemory(
        weights=sizes.engine_weights,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        static_share=share,
        static_share_is_assumed=assumed,
        limit=device_bytes,
        kv_tokens=min(tokens, rollout.kv_cache_tokens or tokens),
        context_tokens=rollout.context_tokens,
        wanted_tokens=rollout.max_running_requests * rollout.context_tokens // 2,
    )
