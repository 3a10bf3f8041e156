"""Scores a policy on held-out prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rl_tpu.config.schema import EvalSetConfig, RunConfig
from rl_tpu.environments import Environment
from rl_tpu.environments.calling import together
from rl_tpu.orchestrator.evaluation_metrics import Scores, evaluation_metrics, prompt_scores
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Evaluator, Fleet
from rl_tpu.rollout.sampling import evaluation_params
from rl_tpu.types import Group, Prompt


@dataclass
class EvalSet:
    """One evaluation set, ready to run."""

    name: str
    config: EvalSetConfig
    prompts: list[Prompt]


@dataclass
class EvalResult:
    """``metrics`` of one set (see `evaluation_metrics`), the groups behind them, and each group's own scores."""

    metrics: dict[str, float]
    groups: list[Group]
    scores: list[Scores]


async def evaluate(
    sets: list[EvalSet],
    config: RunConfig,
    environment: Environment,
    engines: Fleet | Evaluator,
    rewards: RewardService,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, EvalResult]:
    """Answer and score every prompt of every set, of all sets at the same time; results by set name.

    So many prompts are open at once as the engines decode samples: conversations cost memory, and processes, too.
    """
    at_once = config.rollout.max_running_requests * (config.rollout.engines if isinstance(engines, Fleet) else 1)
    gate = asyncio.Semaphore(at_once)

    async def answer(index: int, prompt: Prompt, chosen: EvalSetConfig) -> Group:
        async with gate:
            params = evaluation_params(config, chosen, prompt, index)
            generate = partial(engines.generate, session=prompt.id)
            samples = await environment.run(prompt, chosen.samples_per_prompt, params, generate)
        await rewards.score(prompt, samples)
        on_progress(1)
        return Group(index, prompt, samples)

    async def score(chosen: EvalSet) -> EvalResult:
        groups = await together(answer(index, prompt, chosen.config) for index, prompt in enumerate(chosen.prompts))
        scores = [prompt_scores(group) for group in groups]
        return EvalResult(evaluation_metrics(groups, scores, config.evaluation.confidence), groups, scores)

    results = await together(score(chosen) for chosen in sets)
    return {chosen.name: result for chosen, result in zip(sets, results, strict=True)}
