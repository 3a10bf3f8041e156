"""Work with an engine of its own, while training goes on with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rl_tpu.rollout.fleet import Evaluator, Fleet


class BesideTraining:
    """At most one piece of work at a time. Whoever starts it sees to its end: with `settle`, or with `close`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether something was started that has not been settled."""
        return self._task is not None

    async def start(self, fleet: Fleet, work: Callable[[Evaluator], Awaitable[None]]) -> None:
        """Set an engine aside and begin to work with it. On return the engine keeps the policy that it had at the call.

        Raises RunError if no engine can be set aside.
        """
        if self._task is not None:
            raise RuntimeError("work was started before the earlier one was settled")
        is_aside = asyncio.Event()

        async def go() -> None:
            async with fleet.set_aside() as evaluator:
                is_aside.set()
                await work(evaluator)

        self._task = asyncio.create_task(go())
        waiting = asyncio.create_task(is_aside.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not is_aside.is_set():
            await self.settle()

    async def settle(self, wait: bool = True) -> None:
        """Let go of the work if it has ended; with ``wait``, once it has. Raises what the work raised."""
        if self._task is None or not (wait or self._task.done()):
            return
        await asyncio.wait({self._task})  # if this is cancelled, the work is not
        task, self._task = self._task, None
        task.result()

    async def close(self) -> None:
        """Break the work off; when this returns the engine is no longer aside."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
