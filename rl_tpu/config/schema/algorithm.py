"""From rewards to a loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Count, NonNegative, Positive, Section


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage: Literal["group_std", "group_mean"] = "group_std"
    """`group_std`: (reward - group mean) / (group standard deviation + 1e-6), GRPO; `group_mean`: without the division."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratio is clipped above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens of the minibatch (DAPO), or over each sample first (GRPO as published)."""
    drop_uniform_groups: bool = False
    """Dynamic sampling: groups whose rewards are all equal teach nothing; drop them and generate others."""
    max_generation_batches: Positive = 10
    """With drop_uniform_groups: prompts drawn for one step are at most this many times prompts_per_step; then the step
    goes on with what it has."""
    overlong_buffer_tokens: Count = 0
    """Soft overlong penalty (DAPO): over the last so many tokens before max_response_tokens the reward falls linearly."""
    overlong_penalty: NonNegative = 1.0
    """Largest soft overlong penalty, subtracted at full length."""
    minibatches: Positive = 1
    """Optimizer steps per rollout step: the batch is cut into so many parts of equal sample count."""
