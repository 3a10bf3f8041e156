"""Scoring samples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Positive, Seconds, Section


class RewardConfig(Section):
    """How a sample is scored."""

    name: str
    """A registered name (math, reasoning_gym), or an import path `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    workers: Positive = 1
    """Worker processes."""
    timeout_s: Seconds = 10.0
    """Deadline of one sample's reward; past it the worker is replaced and the sample scores `failure_reward`."""
    failure_reward: float = 0.0
    """Reward of a sample whose grading timed out or crashed."""
    on_error: Literal["fail", "score"] = "fail"
    """A reward function that raises: end the run with the message (`fail`), or count it and give `failure_reward`."""
