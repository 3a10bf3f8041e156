"""Scoring samples in worker processes, each under a deadline.

Reward functions parse what a model wrote: they hang, crash and raise. Here none of that stops a run or blocks its loop:
a late or dead worker is replaced and its sample gets the configured reward.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass

from pebble import ProcessExpired, ProcessPool

from rl_tpu.config.schema import RewardConfig
from rl_tpu.errors import RunError
from rl_tpu.rewards import worker
from rl_tpu.rewards.registry import find_reward
from rl_tpu.types import Prompt, Sample

WORKER_START_S = 120.0
"""Longest wait for a new worker to import the reward function, on a busy machine."""
POOL_ATTEMPTS = 3
"""A pool that loses an idle worker gives up all that waits in it; those samples are tried so many times in all."""


@dataclass(frozen=True)
class RewardStats:
    """Counts since the last reading. ``seconds`` were spent inside reward functions, summed over samples."""

    scored: int = 0
    timeouts: int = 0
    crashes: int = 0
    errors: int = 0
    seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.scored if self.scored else 0.0


class RewardService:
    """Worker processes that score samples; they start with the first sample.

    Raises UserError at once for an unknown reward or options that it does not take. Workers end with `close`, and with
    the thread that scored first: use the service in the driver's main thread.
    """

    def __init__(self, config: RewardConfig) -> None:
        find_reward(config.name, config.options)
        self._config = config
        self._part = config.name.rpartition(":")[2]
        self._pool: ProcessPool | None = None
        self._pending: set[Future] = set()
        self._closed = False
        self._counts = dict.fromkeys(RewardStats.__dataclass_fields__, 0)

    def start(self) -> None:
        """Start the workers now, so that they are ready when the first sample comes. Returns at once."""
        self._running_pool().schedule(os.getpid)

    async def score(self, prompt: Prompt, samples: list[Sample]) -> None:
        """Fill ``reward``, ``reward_parts`` and ``reward_error`` of every sample of one prompt.

        Raises RunError if the reward function raises (or returns no finite number) and ``on_error`` is ``fail``, and if
        the service is closed meanwhile.
        """
        outcomes = await asyncio.gather(*(self._score(prompt, sample) for sample in samples), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def take_stats(self) -> RewardStats:
        """Counts since the last call."""
        stats = RewardStats(**self._counts)
        self._counts = dict.fromkeys(self._counts, 0)
        return stats

    def close(self) -> None:
        """End all workers; none is left when this returns. May be called twice."""
        self._closed = True
        self._stop_pool()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _score(self, prompt: Prompt, sample: Sample) -> None:
        try:
            score = await self._grade(prompt, sample)
        except TimeoutError:
            score = worker.Score(error=f"no reward within {self._config.timeout_s:g} s", seconds=self._config.timeout_s)
            self._counts["timeouts"] += 1
        except (ProcessExpired, BrokenProcessPool) as error:
            exit_code = f" with exit code {error.exitcode}" if isinstance(error, ProcessExpired) else ""
            score = worker.Score(error=f"the reward worker died{exit_code}")
            self._counts["crashes"] += 1
        else:
            self._counts["errors"] += score.error is not None
            if score.error is not None and self._config.on_error == "fail":
                raise RunError(
                    f"reward {self._config.name!r} failed on a sample of prompt {prompt.id!r}: {score.error}; "
                    "mend it, or set reward.on_error=score to count such samples and go on"
                )
        self._counts["scored"] += 1
        self._counts["seconds"] += score.seconds
        sample.reward_error = score.error
        sample.reward_parts = score.parts if score.error is None else {self._part: self._config.failure_reward}
        sample.reward = sum(sample.reward_parts.values())

    async def _grade(self, prompt: Prompt, sample: Sample) -> worker.Score:
        """One sample's score; TimeoutError past its deadline, ProcessExpired or BrokenProcessPool if workers died."""
        for _ in range(POOL_ATTEMPTS):
            if self._closed:
                raise RunError("the reward service is closed")
            pool = self._running_pool()
            try:
                return await self._grade_in(pool, prompt, sample)
            except BrokenProcessPool:
                if self._pool is pool:
                    self._stop_pool()
        raise BrokenProcessPool

    async def _grade_in(self, pool: ProcessPool, prompt: Prompt, sample: Sample) -> worker.Score:
        try:
            future = pool.schedule(
                worker.score, args=(sample.text, prompt.answer, prompt), timeout=self._config.timeout_s
            )
        except RuntimeError as error:  # it broke since the last sample
            raise BrokenProcessPool(str(error)) from error
        self._pending.add(future)
        # The pool counts a sample's deadline from the moment a worker takes it. This one covers the queue before that.
        rounds = 1 + len(self._pending) // self._config.workers
        patience = rounds * (self._config.timeout_s + WORKER_START_S)
        try:
            async with asyncio.timeout(patience) as guard:
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if guard.expired():
                raise RunError(
                    f"reward {self._config.name!r}: no worker took a sample within {patience:.0f} s"
                ) from None
            raise
        finally:
            self._pending.discard(future)

    def _running_pool(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._config.workers,
                initializer=worker.start,
                initargs=(self._config.name, self._part, self._config.options, os.getpid()),
                # Not forked: a worker has no business with the driver's Ray, gRPC and torch threads.
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _stop_pool(self) -> None:
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        pool.stop()
        pool.join()
        for future in list(self._pending):
            with suppress(InvalidStateError):  # done already
                future.set_exception(BrokenProcessPool("the workers were stopped"))
        self._pending.clear()
