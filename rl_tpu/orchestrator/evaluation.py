"""Scores a policy on held-out prompts: mean reward and pass@k per set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rl_tpu.algorithms.pass_at_k import pass_at_k
from rl_tpu.config.schema import EvalSetConfig, RunConfig
from rl_tpu.environments import Environment
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.sampling import evaluation_params
from rl_tpu.tracking.rollout_metrics import SOLVED
from rl_tpu.types import Group, Prompt


@dataclass
class EvalSet:
    """One evaluation set, ready to run."""

    name: str
    config: EvalSetConfig
    prompts: list[Prompt]


@dataclass
class EvalResult:
    """``metrics`` of one set (`reward_mean`, `pass@1`, ...) and the groups behind them."""

    metrics: dict[str, float]
    groups: list[Group]


async def evaluate(
    sets: list[EvalSet],
    config: RunConfig,
    environment: Environment,
    fleet: Fleet,
    rewards: RewardService,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, EvalResult]:
    """Answer and score every prompt of every set; results by set name.

    A sample counts as solved from `SOLVED` on. Requests in flight are bounded by what the engines decode at once.
    """
    gate = asyncio.Semaphore(max(1, config.rollout.engines * config.rollout.max_running_requests))

    async def answer(index: int, prompt: Prompt, chosen: EvalSetConfig) -> Group:
        async with gate:
            params = evaluation_params(config, chosen, prompt, index)
            generate = partial(fleet.generate, session=prompt.id)
            samples = await environment.run(prompt, chosen.samples_per_prompt, params, generate)
        await rewards.score(prompt, samples)
        on_progress(1)
        return Group(index, prompt, samples)

    results = {}
    for chosen in sets:
        groups = await asyncio.gather(*(answer(i, p, chosen.config) for i, p in enumerate(chosen.prompts)))
        results[chosen.name] = EvalResult(evaluation_metrics(groups), list(groups))
    return results


def evaluation_metrics(groups: list[Group]) -> dict[str, float]:
    """Mean reward, pass@k for k = 1, 2, 4, ... n, and how long the answers were."""
    samples = [sample for group in groups for sample in group.samples]
    n = min(len(group.samples) for group in groups)
    metrics = {"reward_mean": sum(sample.reward for sample in samples) / len(samples)}
    k = 1
    while k <= n:
        estimates = [pass_at_k(len(g.samples), sum(s.reward >= SOLVED for s in g.samples), k) for g in groups]
        metrics[f"pass@{k}"] = sum(estimates) / len(estimates)
        k *= 2
    metrics["response_tokens_mean"] = sum(len(sample.response_ids) for sample in samples) / len(samples)
    metrics["truncated_share"] = sum(sample.finish_reason == "length" for sample in samples) / len(samples)
    metrics["reward_error_count"] = float(sum(sample.reward_error is not None for sample in samples))
    return metrics
