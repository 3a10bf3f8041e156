"""Scoring samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Positive, Seconds, Section


class RewardPart(Section):
    """One term of a weighted sum."""

    name: str
    """A registered name, or an import path `package.module:function`."""
    weight: float = 1.0
    """What its number is multiplied with before it is added."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    label: str | None = None
    """Its name in metrics and dumps (`reward/LABEL_mean`); null takes the function's name."""


class RewardChoice(Section):
    """One reward function (`name`) or a weighted sum of several (`parts`)."""

    name: str | None = None
    """A registered name (docs/rewards.md lists them), or an import path `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function `name`."""
    parts: list[RewardPart] = Field(default_factory=list)
    """A weighted sum, in place of `name`: a list of {name, weight, options, label}."""


class RewardConfig(RewardChoice):
    """How a sample is scored: by one function (`name`), a weighted sum (`parts`), or by the row's source (`by_source`)."""

    by_source: dict[str, RewardChoice] = Field(default_factory=dict)
    """Several rewards for a mixture of data sets, in place of `name` and `parts`: a source's name to {name, options} or
    {parts}. `default` takes the sources that are not listed."""
    source_field: str | None = None
    """by_source: the field of a prompt's row that names its source (`data_source` in verl's files); dots go into nested
    fields. Null: the name of the prompt's source in the mixture of data.train."""
    workers: Positive = 1
    """Worker processes."""
    timeout_s: Seconds = 10.0
    """Deadline of one sample's reward (of a whole group's, if the function takes groups); past it the worker is replaced
    and the sample scores `failure_reward`."""
    worker_memory_gb: Annotated[float, Field(gt=0)] | None = 8.0
    """What a worker may allocate; one that wants more counts as crashed. Null: no limit."""
    failure_reward: float = 0.0
    """Reward of a sample whose grading timed out or crashed."""
    on_error: Literal["fail", "score"] = "fail"
    """A reward function that raises: end the run with the message (`fail`), or count it and give `failure_reward`."""
