"""Keeps groups in flight: draws prompts, has them answered and scored, and hands finished groups to the loop.

Pacing is one number. Under policy version v the g-th group of the run may be drawn if g < (v + max_staleness + 1) x
prompts_per_step, so 0 is synchronous, 1 is one step off, k is asynchronous with a bound; nothing is drawn for steps after
the last. Groups may overtake each other, but never so far that an older one could no longer train within the bound: then
the batch waits for the older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rl_tpu.algorithms.filters import is_uniform
from rl_tpu.config.schema import RunConfig
from rl_tpu.data import MixtureStream, PromptStream
from rl_tpu.errors import RunError
from rl_tpu.types import Group, Prompt

Answer = Callable[[Prompt], Awaitable[Group]]
"""Has a prompt answered and scored; the collector numbers the group."""


class Collector:
    """Groups in flight and groups ready, under the staleness bound.

    ``answer`` runs once per drawn prompt. Nothing is drawn before `advance` announces the version that engines serve.
    """

    def __init__(self, config: RunConfig, stream: PromptStream | MixtureStream, answer: Answer):
        self._per_step = config.rollout.prompts_per_step
        self._staleness = config.rollout.max_staleness
        self._drop_uniform = config.algorithm.drop_uniform_groups
        self._steps = config.trainer.steps
        # What is drawn ahead for later steps does not use up the draws of this one.
        self._draws_per_step = (config.algorithm.max_generation_batches + self._staleness) * self._per_step
        self._stream = stream
        self._answer = answer
        self._version = 0
        self._consumed = 0
        """Groups given to the loop so far, over the whole run."""
        self._drawn_this_step = 0
        self._next_index = 0
        self._ready: list[Group] = []
        self._uniform: list[Group] = []
        self._in_flight: dict[asyncio.Task[Group], tuple[int, Prompt, int]] = {}
        """Index, prompt and the version it was drawn under."""
        self._again: list[tuple[int, Prompt]] = []
        """Prompts drawn by an interrupted run and not finished: drawn again first."""
        self._finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self._used_up = False
        """The stream has ended."""
        self.dropped = 0
        """Uniform groups dropped since the batch before the one that `batch` returned last."""

    def advance(self, version: int) -> None:
        """Engines serve `version` now: draw what the bound allows."""
        self._version = version
        self._draw()

    async def batch(self, version: int) -> list[Group]:
        """The groups that train policy `version` into the next one, oldest first; none if the prompts are used up.

        Raises:
            RunError: a group could not be answered or scored.
        """
        while len(self._ready) < self._per_step or not self._leaves_room_for_older(version):
            if not self._in_flight:
                if self._used_up and len(self._ready) < self._per_step:
                    return []
                self._fill_with_uniform()
                break
            task = await self._finished.get()
            if task in self._in_flight:  # else `state` has taken it
                self._take(task)
            self._draw()
        batch, self._ready = self._ready[: self._per_step], self._ready[self._per_step :]
        self._consumed += len(batch)
        self._drawn_this_step = len(self._ready) + len(self._in_flight)
        self.dropped = len(self._uniform)
        self._uniform.clear()
        for group in batch:
            staleness = version - _oldest_version(group)
            if staleness > self._staleness:
                raise RunError(f"group {group.index} is {staleness} versions old, the bound is {self._staleness}")
        return batch

    def state(self) -> dict[str, Any]:
        """Everything needed to go on: position in the prompts, finished groups, prompts in flight."""
        for task in [task for task in self._in_flight if task.done() and not task.cancelled()]:
            if task.exception() is None:
                self._take(task)
        in_flight = sorted(((index, prompt) for index, prompt, _ in self._in_flight.values()), key=lambda item: item[0])
        return {
            "stream": self._stream.state_dict(),
            "consumed": self._consumed,
            "next_index": self._next_index,
            "ready": list(self._ready),
            "in_flight": [*self._again, *in_flight],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; prompts that were in flight are answered first."""
        self._stream.load_state_dict(state["stream"])
        self._consumed = state["consumed"]
        self._next_index = state["next_index"]
        self._ready = list(state["ready"])
        self._again = list(state["in_flight"])

    async def close(self) -> None:
        """Cancel what is in flight."""
        tasks = list(self._in_flight)
        self._in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _draw(self) -> None:
        bound = min(self._version + self._staleness + 1, self._steps) * self._per_step
        while (
            self._consumed + len(self._ready) + len(self._in_flight) < bound
            and self._drawn_this_step < self._draws_per_step
        ):
            if self._again:
                index, prompt = self._again.pop(0)
            elif (prompt := next(self._stream, None)) is not None:
                index = self._next_index
                self._next_index += 1
            else:
                self._used_up = True
                return
            task = asyncio.create_task(self._answer(prompt), name=f"group-{index}")
            self._in_flight[task] = (index, prompt, self._version)
            self._drawn_this_step += 1
            task.add_done_callback(self._finished.put_nowait)

    def _take(self, task: asyncio.Task[Group]) -> None:
        index, *_ = self._in_flight.pop(task)
        group = task.result()
        group.index = index
        for number, sample in enumerate(group.samples):
            sample.id = f"{index}-{number}"
        keep = not (self._drop_uniform and is_uniform(group.rewards))
        (self._ready if keep else self._uniform).append(group)
        self._ready.sort(key=lambda group: (_oldest_version(group), group.index))

    def _leaves_room_for_older(self, version: int) -> bool:
        """Whether, after the oldest ready groups are taken, all others still fit the steps that their age allows."""
        left = [_oldest_version(group) for group in self._ready[self._per_step :]]
        left += [drawn for *_, drawn in self._in_flight.values()]
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


def _oldest_version(group: Group) -> int:
    return min(sample.oldest_version for sample in group.samples)
