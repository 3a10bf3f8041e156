"""What preflight looks at. Training ignores it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_tpu.config.schema.base import Seconds, Section


class PreflightConfig(Section):
    """`python -m rl_tpu.preflight`: compiling ahead of time, and checks of the machine. Training ignores it."""

    topology: str | None = None
    """Slice to compile for, by libtpu's name, for example TPU7x:2x2x1; null: the hosts on which the trainer runs."""
    cache: str | None = None
    """Directory that keeps the results of compiling, by program; null: preflight/ in RL_TPU_CACHE or ~/.cache/rl_tpu."""
    only: list[Literal["logprobs", "reference", "backward", "update"]] = Field(default_factory=list)
    """Programs to compile; empty: all that the run needs. Without all of them nothing is said to fit."""
    collective_timeout_s: Seconds = 60.0
    """Deadline for all trainer ranks to start, and for the collective that they then do together."""
