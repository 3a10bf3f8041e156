"""The machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_tpu.config.schema.base import Positive, Seconds, Section


class ClusterConfig(Section):
    """The machine: chips per host and who gets them. On a CPU a chip is a share of the cores."""

    device: str
    """Kind of accelerator, by its name in rl_tpu/devices: cpu (the same parts, smaller), cuda or tpu."""
    generation: str = ""
    """Chip generation, for example v7x."""
    hosts: Positive = 1
    """Hosts."""
    chips_per_host: Positive
    """Chips (CPU: shares) in one host."""
    devices_per_chip: Positive = 1
    """Devices torch sees in one chip: 2 on v7x, else 1. One process per device."""
    trainer_chips: Positive
    """Chips for the trainer ranks."""
    rollout_chips: Positive
    """Chips for the engines."""
    cpus_per_chip: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores that Ray reserves with each chip."""
    address: str | None = None
    """Ray cluster to join (`auto` for a running one); null joins RAY_ADDRESS if set, else starts Ray on this machine."""
    start_timeout_s: Seconds = 120.0
    """Deadline for Ray to reserve the chips."""
