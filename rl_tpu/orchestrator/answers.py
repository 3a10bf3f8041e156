"""From a prompt to a scored group: environment, engines and rewards together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rl_tpu.config.schema import RunConfig
from rl_tpu.environments import Environment
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.sampling import training_params
from rl_tpu.tracking.activity import Activity
from rl_tpu.types import Group, Prompt


@dataclass
class Answers:
    """Has training prompts answered and scored: what the collector calls with every prompt that it draws."""

    config: RunConfig
    environment: Environment
    fleet: Fleet
    rewards: RewardService
    activity: Activity = field(default_factory=lambda: Activity("answering", "rewarding"))

    async def __call__(self, prompt: Prompt) -> Group:
        params, n = training_params(self.config, prompt), self.config.rollout.samples_per_prompt
        with self.activity("answering"):
            generate = partial(self.fleet.generate, session=prompt.id)
            samples = await self.environment.run(prompt, n, params, generate)
        with self.activity("rewarding"):
            await self.rewards.score(prompt, samples)
        return Group(-1, prompt, samples)

    def metrics(self) -> dict[str, float]:
        """Since the last call: how rewards were computed, `perf/answering_s`, and `perf/rewarding_s` while nothing was being
        answered."""
        stats = self.rewards.take_stats()
        return self.activity.lap() | {
            "reward/timeouts": float(stats.timeouts),
            "reward/crashes": float(stats.crashes),
            "reward/seconds_mean": stats.mean_seconds,
        }
