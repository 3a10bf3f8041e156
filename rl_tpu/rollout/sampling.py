"""How a prompt is sampled: what the configuration says, and what the prompt's row changes of it."""

from __future__ import annotations

import dataclasses

from rl_tpu.config.schema import EvalSetConfig, RunConfig
from rl_tpu.types import Prompt, SamplingParams


def training_params(config: RunConfig, prompt: Prompt) -> SamplingParams:
    """How a training prompt is sampled."""
    rollout = config.rollout
    params = SamplingParams(
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
    return dataclasses.replace(params, **prompt.sampling)


def evaluation_params(config: RunConfig, chosen: EvalSetConfig, prompt: Prompt, index: int) -> SamplingParams:
    """How prompt number ``index`` of an evaluation set is sampled."""
    params = SamplingParams(
        max_response_tokens=chosen.max_response_tokens or config.rollout.max_response_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        stop_token_ids=tuple(chosen.stop_token_ids),
        seed=(config.seed if chosen.seed is None else chosen.seed) + index * chosen.samples_per_prompt,
    )
    return dataclasses.replace(params, **prompt.sampling)
