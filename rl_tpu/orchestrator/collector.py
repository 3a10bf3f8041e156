"""Keeps groups in flight: draws prompts, has them answered and scored, and hands finished groups to the loop.

Pacing is one number. Under policy version v the g-th group of the run may be drawn if g < (v + max_staleness + 1) x
prompts_per_step, so 0 is synchronous, 1 is one step off, k is asynchronous with a bound; nothing is drawn for steps after
the last. With `rollout.oversampling` more are in flight than may still be drawn. Groups overtake each other, and what
becomes of an older one that could no longer train within the bound is `rollout.stale_groups`: the batch waits for it, it
is dropped, or it trains later all the same.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rl_tpu.algorithms.filters import is_uniform
from rl_tpu.config.schema import RunConfig
from rl_tpu.data import MixtureStream, PromptStream
from rl_tpu.errors import RunError
from rl_tpu.tracking.rollout_metrics import quantile
from rl_tpu.types import Group, Prompt

Answer = Callable[[Prompt], Awaitable[Group]]
"""Has a prompt answered and scored; the collector numbers the group."""
TAIL = 0.9
"""What a batch waits for once this share of its groups is ready is its tail."""


@dataclass(frozen=True)
class _Drawn:
    """A prompt being answered, the policy version that it was drawn under, and when."""

    index: int
    prompt: Prompt
    version: int
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Ready:
    """``drawn`` and ``ready_at`` are None for a group from a checkpoint."""

    group: Group
    drawn: _Drawn | None = None
    ready_at: float | None = None

    @property
    def oldest_version(self) -> int:
        return min(sample.oldest_version for sample in self.group.samples)

    @property
    def drawn_version(self) -> int:
        return self.oldest_version if self.drawn is None else self.drawn.version


class Collector:
    """Groups in flight and groups ready, under the staleness bound.

    ``answer`` runs once per drawn prompt. Nothing is drawn before `advance` announces the version that engines serve.
    """

    def __init__(self, config: RunConfig, stream: PromptStream | MixtureStream, answer: Answer):
        rollout = config.rollout
        self._per_step = rollout.prompts_per_step
        self._staleness = rollout.max_staleness
        self._stale_groups = rollout.stale_groups
        # Who waits for all of them can have no more in flight than can train in time.
        self._oversampling = 1.0 if self._stale_groups == "wait" else rollout.oversampling
        self._drop_uniform = config.algorithm.drop_uniform_groups
        self._steps = config.trainer.steps
        # What is drawn ahead for later steps does not use up the draws of this one.
        ahead = self._oversampled((self._staleness + 1) * self._per_step)
        self._draws_per_step = (config.algorithm.max_generation_batches - 1) * self._per_step + ahead
        self._stream = stream
        self._answer = answer
        self._version = 0
        self._consumed = 0
        """Groups given to the loop so far, over the whole run."""
        self._drawn_this_step = 0
        self._next_index = 0
        self._ready: list[_Ready] = []
        self._uniform: list[_Ready] = []
        self._dropped_before = 0
        """Uniform groups that an interrupted run dropped after its last batch."""
        self._in_flight: dict[asyncio.Task[Group], _Drawn] = {}
        self._again: list[tuple[int, Prompt]] = []
        """Prompts drawn by an interrupted run and not finished: drawn again first."""
        self._cancelled: set[asyncio.Task[Group]] = set()
        """Tasks that have yet to notice it."""
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        """Of the first group that could not be answered or scored."""
        self._used_up = False
        """The stream has ended."""
        self._dropped_stale = 0
        self.metrics: dict[str, float] = {}
        """Of the batch that `batch` returned last: see `rollout_metrics`."""

    def advance(self, version: int) -> None:
        """Engines serve `version` now: draw what the bound allows."""
        self._version = version
        self._draw()

    async def batch(self, version: int) -> list[Group]:
        """The groups that train policy `version` into the next one, oldest first; none if the prompts are used up.

        Raises:
            RunError: a group could not be answered or scored.
        """
        asked_at = time.monotonic()
        self._drop_stale(version)
        self._draw()
        while not self._failure and not self._enough(version):
            if not self._in_flight:
                if self._used_up and len(self._ready) < self._per_step:
                    return []
                self._fill_with_uniform()
                break
            self._changed.clear()
            await self._changed.wait()
        if self._failure:
            raise self._failure
        batch, self._ready = self._ready[: self._per_step], self._ready[self._per_step :]
        self._consumed += len(batch)
        self._drop_stale(version + 1)
        self._measure(batch, version, asked_at)
        self._drawn_this_step = len(self._ready) + len(self._in_flight)
        self._uniform.clear()
        self._dropped_before = 0
        self._dropped_stale = 0
        self._draw()
        if self._stale_groups != "correct":
            for staleness, group in ((version - one.oldest_version, one.group) for one in batch):
                if staleness > self._staleness:
                    raise RunError(f"group {group.index} is {staleness} versions old, the bound is {self._staleness}")
        return [one.group for one in batch]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on: position in the prompts, finished groups, prompts in flight."""
        in_flight = sorted(
            ((drawn.index, drawn.prompt) for drawn in self._in_flight.values()), key=lambda item: item[0]
        )
        return {
            "stream": self._stream.state_dict(),
            "consumed": self._consumed,
            "next_index": self._next_index,
            "ready": [one.group for one in self._ready],
            "in_flight": [*self._again, *in_flight],
            "dropped": len(self._uniform) + self._dropped_before,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; prompts that were in flight are answered first."""
        self._stream.load_state_dict(state["stream"])
        self._consumed = state["consumed"]
        self._next_index = state["next_index"]
        self._ready = [_Ready(group) for group in state["ready"]]
        self._again = list(state["in_flight"])
        self._dropped_before = state.get("dropped", 0)

    async def close(self) -> None:
        """Cancel what is in flight."""
        self._cancel(list(self._in_flight))
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    def _draw(self) -> None:
        in_all = self._steps * self._per_step
        bound = min(in_all, (self._version + self._staleness + 1) * self._per_step)
        while self._drawn_this_step < self._draws_per_step:
            kept = self._consumed + len(self._ready)
            if len(self._in_flight) >= min(self._oversampled(bound - kept), in_all - kept):
                return
            if self._again:
                index, prompt = self._again.pop(0)
            elif (prompt := next(self._stream, None)) is not None:
                index = self._next_index
                self._next_index += 1
            else:
                self._used_up = True
                return
            task = asyncio.create_task(self._answer(prompt), name=f"group-{index}")
            self._in_flight[task] = _Drawn(index, prompt, self._version)
            self._drawn_this_step += 1
            task.add_done_callback(self._finish)

    def _oversampled(self, groups: int) -> int:
        return math.ceil(round(self._oversampling * groups, 6))  # 1.1 x 10 are 11

    def _finish(self, task: asyncio.Task[Group]) -> None:
        """An answer is there, whatever the loop does just now: another prompt may take its place."""
        drawn = self._in_flight.get(task)
        if drawn is None:  # it was cancelled
            self._cancelled.discard(task)
            if not task.cancelled():
                task.exception()  # nobody else asks for it
            return
        self._changed.set()
        if task.cancelled() or task.exception() is not None:  # the prompt stays in flight, for `state`
            error = None if task.cancelled() else task.exception()
            self._failure = (
                self._failure or error or RunError(f"the answer to prompt {drawn.prompt.id!r} was broken off")
            )
            return
        del self._in_flight[task]
        group = task.result()
        group.index = drawn.index
        for number, sample in enumerate(group.samples):
            sample.id = f"{drawn.index}-{number}"
        keep = not (self._drop_uniform and is_uniform(group.rewards))
        one = _Ready(group, drawn, time.monotonic())
        if keep:
            bisect.insort(self._ready, one, key=lambda one: (one.oldest_version, one.group.index))
        else:
            self._uniform.append(one)
        self._draw()

    def _drop_stale(self, version: int) -> None:
        """Drop what will be too old to train `version`, if that is wanted, and stop writing what is going to be."""
        if self._stale_groups != "drop":
            return
        oldest, before = version - self._staleness, len(self._ready)
        self._ready = [one for one in self._ready if one.oldest_version >= oldest]
        late = [task for task, drawn in self._in_flight.items() if drawn.version < oldest and not task.done()]
        self._cancel(late)
        self._dropped_stale += before - len(self._ready) + len(late)

    def _cancel(self, tasks: list[asyncio.Task[Group]]) -> None:
        for task in tasks:
            del self._in_flight[task]
            self._cancelled.add(task)
            task.cancel()

    def _enough(self, version: int) -> bool:
        """Whether a batch can be taken."""
        if len(self._ready) < self._per_step:
            return False
        return self._stale_groups != "wait" or self._leaves_room_for_older(version)

    def _leaves_room_for_older(self, version: int) -> bool:
        """Whether, after the oldest ready groups are taken, all others still fit the steps that their age allows."""
        left = [one.oldest_version for one in self._ready[self._per_step :]]
        left += [drawn.version for drawn in self._in_flight.values()]
        return all(
            sum(age <= bound for age in left) <= (bound + self._staleness - version) * self._per_step
            for bound in range(version - self._staleness, version)
        )

    def _fill_with_uniform(self) -> None:
        """The step's bound on draws is used up: go on with uniform groups (their advantages are zero)."""
        missing = self._per_step - len(self._ready)
        if missing <= 0:
            return
        if len(self._uniform) < missing:
            raise RunError(f"{missing} groups are missing and none is in flight; was advance() called?")
        self._ready += self._uniform[-missing:]
        del self._uniform[-missing:]

    def _measure(self, batch: list[_Ready], version: int, asked_at: float) -> None:
        """`metrics` of a batch that is taken and of what it leaves."""
        staleness = [version - sample.oldest_version for one in batch for sample in one.group.samples]
        seconds = [one.ready_at - one.drawn.at for one in batch if one.drawn]
        tail_since = quantile([one.ready_at or asked_at for one in batch], TAIL)
        self.metrics = {
            "rollout/dropped_groups": float(len(self._uniform) + self._dropped_before),
            "rollout/dropped_stale_groups": float(self._dropped_stale),
            "rollout/stale_share": sum(lag > self._staleness for lag in staleness) / len(staleness),
            "rollout/carried_groups": float(sum(one.drawn_version < version for one in batch)),
            "rollout/in_flight_groups": float(len(self._in_flight)),
            "rollout/ready_groups": float(len(self._ready)),
            "rollout/tail_wait_s": time.monotonic() - max(asked_at, tail_since),
        }
        if seconds:
            self.metrics |= {"rollout/group_s_p50": quantile(seconds, 0.5), "rollout/group_s_max": max(seconds)}
