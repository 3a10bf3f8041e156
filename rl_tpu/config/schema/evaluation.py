"""Evaluation on held-out prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_tpu.config.schema.base import Count, NonNegative, Positive, Section, Seed
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
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens; -1 for all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample among the tokens that are at least this share as likely as the likeliest; 0 for all."""
    stop_token_ids: list[Count] = Field(default_factory=list)
    """Tokens that end an answer, besides the model's own end tokens."""
    seed: Seed | None = None
    """Seed of the first prompt's first answer, the others' follow from it; null takes the run's. Two evaluations with one
    seed differ by their policies alone where the engine is deterministic."""
    max_response_tokens: Positive | None = None
    """Longest answer; null takes rollout.max_response_tokens."""


class EvaluationConfig(Section):
    """Evaluation on held-out prompts. It always runs before the first step and after the last one."""

    every_steps: Count = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    beside_training: bool = False
    """Go on training meanwhile: one engine of at least two keeps the policy that is evaluated and answers nothing else until
    the evaluation is done."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the confidence intervals."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Evaluation sets by name."""
