"""What a run leaves behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_tpu.config.schema.base import Section


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """offline writes to the run directory and needs no account; online uses WANDB_API_KEY and the other usual variables."""
    project: str = "rl_tpu"
    """Project name."""


class TrackingConfig(Section):
    """What a run leaves behind besides metrics.jsonl, summary.json and the curves, which are always written."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    samples: bool = True
    """Dump every sample of every step: prompt, response, ids, rewards, versions."""
    plot_metrics: list[str] = Field(default_factory=list)
    """Further metrics to draw besides the standard curves."""
