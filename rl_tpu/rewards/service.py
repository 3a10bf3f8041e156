"""Scoring samples in worker processes, each under a deadline.

Reward functions parse what a model wrote: they hang, crash and raise. Here none of that stops a run or blocks its loop:
a late or dead worker is replaced and its sample gets the configured reward.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from rl_tpu.config.schema import RewardConfig
from rl_tpu.errors import RunError
from rl_tpu.rewards.plan import ENVIRONMENT, make_plan
from rl_tpu.rewards.pool import WorkerDied, WorkerPool
from rl_tpu.rewards.registry import Response
from rl_tpu.rewards.worker import OUT_OF_MEMORY_EXIT_CODE, Job, Score, Setup
from rl_tpu.types import Prompt, Sample


@dataclass(frozen=True)
class RewardStats:
    """Counts of samples since the last reading. ``seconds`` were spent inside reward functions, summed over samples."""

    scored: int = 0
    timeouts: int = 0
    crashes: int = 0
    errors: int = 0
    seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.scored if self.scored else 0.0


class RewardService:
    """Worker processes that score samples; they start with `start` or the first sample and end with `close`.

    Raises UserError at once for an unknown reward or options that it does not take.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._plan = make_plan(config)
        self._pool: WorkerPool | None = None
        self._closed = False
        self._counts = dict.fromkeys(RewardStats.__dataclass_fields__, 0)

    def start(self) -> None:
        """Start the workers now, so that they are ready when the first sample comes. Returns at once."""
        if self._closed:
            raise RunError("the reward service is closed")
        if self._pool is None:
            memory = self._config.worker_memory_gb
            setup = Setup(self._plan.terms, memory and int(memory * 1e9), os.getpid())
            self._pool = WorkerPool(self._config.workers, self._config.timeout_s, setup)

    async def score(self, prompt: Prompt, samples: list[Sample]) -> None:
        """Fill ``reward``, ``reward_parts`` and ``reward_error`` of every sample of one prompt.

        Every sample is a job of its own; functions that take groups get one job for all samples. What the environment gave
        for a sample's turns is added as the part `environment`.

        Raises RunError if a reward function raises (or returns no finite number) and ``on_error`` is ``fail``, if
        ``by_source`` has no entry for the prompt, and if the service is closed meanwhile.
        """
        self.start()
        terms = self._plan.route(prompt)
        grouped = [position for position in terms if self._plan.terms[position].scope == "group"]
        single = tuple(position for position in terms if position not in grouped)
        responses = [Response(sample.text, len(sample.response_ids), sample.finish_reason) for sample in samples]
        jobs = [Job((position,), responses, prompt) for position in grouped]
        jobs += [Job(single, [response], prompt) for response in responses] if single else []
        done = await asyncio.gather(*(self._do(job) for job in jobs), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        whole, alone = done[: len(grouped)], done[len(grouped) :]
        by_environment = not terms or any(turn.reward for sample in samples for turn in sample.turns)
        for index, sample in enumerate(samples):
            scores = [scores[index] for scores in whole] + [scores[0] for scores in alone[index : index + 1]]
            self._fill(sample, scores, by_environment)
        if self._config.on_error == "fail":
            self._raise_error(prompt, [score for scores in done for score in scores])

    def take_stats(self) -> RewardStats:
        """Counts since the last call."""
        stats = RewardStats(**self._counts)
        self._counts = dict.fromkeys(self._counts, 0)
        return stats

    def close(self) -> None:
        """End all workers; none is left when this returns. May be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _do(self, job: Job) -> list[Score]:
        try:
            return await asyncio.wrap_future(self._pool.submit(job))
        except TimeoutError:
            limit = self._config.timeout_s
            failed = Score({}, "timeouts", f"no reward within {limit:g} s", limit / len(job.responses))
        except WorkerDied as death:
            if death.exit_code == OUT_OF_MEMORY_EXIT_CODE:
                reason = f"the reward wanted more memory than reward.worker_memory_gb={self._config.worker_memory_gb:g}"
            else:
                reason = f"the reward worker died with exit code {death.exit_code}"
            failed = Score({}, "crashes", reason)
        return [failed] * len(job.responses)

    def _fill(self, sample: Sample, scores: list[Score], by_environment: bool) -> None:
        """What the terms gave to one sample, added up; the first failure takes all."""
        failed = next((score for score in scores if score.failure), None)
        self._counts["scored"] += 1
        self._counts["seconds"] += sum(score.seconds for score in scores)
        if failed is None:
            sample.reward_error = None
            sample.reward_parts = {}
            for name, value in (part for score in scores for part in score.parts.items()):
                sample.reward_parts[name] = sample.reward_parts.get(name, 0.0) + value
        else:
            self._counts[failed.failure] += 1
            sample.reward_error = failed.error
            terms = self._plan.terms
            sample.reward_parts = {terms[0].label if len(terms) == 1 else "failed": self._config.failure_reward}
        if by_environment:
            sample.reward_parts[ENVIRONMENT] = sum(turn.reward for turn in sample.turns)
        sample.reward = sum(sample.reward_parts.values())

    def _raise_error(self, prompt: Prompt, scores: list[Score]) -> None:
        error = next((score.error for score in scores if score.failure == "errors"), None)
        if error is not None:
            raise RunError(
                f"the reward failed on a sample of prompt {prompt.id!r}: {error}; "
                "mend it, or set reward.on_error=score to count such samples and go on"
            )
