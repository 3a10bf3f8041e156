"""Evaluation on held-out prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_tpu.config.schema.base import Count, NonNegative, Positive, Section
from rl_tpu.config.schema.data import PromptSourceConfig


class EvalSetConfig(Section):
    """One evaluation set and how it is sampled."""

    source: PromptSourceConfig
    """Its prompts."""
    samples_per_prompt: Positive = 1
    """Answers per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    max_response_tokens: Positive | None = None
    """Longest answer; null takes rollout.max_response_tokens."""


class EvaluationConfig(Section):
    """Evaluation on held-out prompts. It always runs before the first step and after the last one."""

    every_steps: Count = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Evaluation sets by name."""
