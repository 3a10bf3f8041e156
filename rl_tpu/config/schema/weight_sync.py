"""Carrying every new policy to the engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Count, Seconds, Section


class WeightSyncConfig(Section):
    """Carrying every new policy to the engines."""

    transport: str = "shared_memory"
    """Registered name of a transport, or an import path `package.module:ATTRIBUTE`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the transport's sender. In strings {run_dir} and {model_dir} stand for the run's directories."""
    delivery: Literal["staged", "broadcast"] = "staged"
    """How engines take a policy. Each fetches and verifies it while it generates and pauses only to load it (`staged`), or
    all stand still together while one copy is sent to all of them through SGLang's own endpoints (`broadcast`, with
    transport ici only): for many engines behind a narrow network, or where engines must not open connections of their
    own."""
    pause_mode: Literal["in_place", "retract", "resume", "abort"] = "retract"
    """What a new policy does to samples in flight: they go on with the key-value cache they have (`in_place`), go on with
    one computed anew (`retract`), are taken out and go on as new requests, perhaps on another engine (`resume`), or are
    dropped and written again from the start (`abort`)."""
    reload_attempts: Count = 1
    """How often, within one sync, engines that did not take a policy are sent the whole of it again."""
    verify: bool = True
    """Engines check xxh3-128 of every tensor before they load it."""
    check_engine_weights: bool = False
    """After every sync compare the engines' own checksums of their live weights with the trainer's (small models)."""
    timeout_s: Seconds = 300.0
    """Deadline of each part of a sync: publishing, staging on the engines, loading."""
