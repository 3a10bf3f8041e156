"""Ctrl-C and SIGTERM: the first one asks the loop to stop at a safe point, the second one ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was asked to stop. ``signal`` is the signal's number; a shell expects the exit code 128 + signal."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.signal = number


def interrupt_by_sigterm() -> None:
    """Until an `Interrupt` takes over, SIGTERM raises Interrupted where the program is, as SIGINT does KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, _interrupted)


class Interrupt:
    """Installs the handlers in the running event loop; `guard` waits for work or for the signal."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._signal = 0
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._ask, number)

    async def guard(self, work: Awaitable[Result]) -> Result:
        """The result of `work`.

        Raises:
            Interrupted: the signal came first; `work` is cancelled.
        """
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._asked.is_set():
                raise Interrupted(self._signal)
            return task.result()
        finally:
            for pending in (task, asked):
                if not pending.done():
                    pending.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    def check(self) -> None:
        """Raise Interrupted if the signal came."""
        if self._asked.is_set():
            raise Interrupted(self._signal)

    def _ask(self, number: int) -> None:
        if self._asked.is_set():
            os._exit(128 + number)
        self._signal = number
        self._asked.set()
        print(
            f"{signal.Signals(number).name}: stopping at the next safe point; once more to stop at once",
            file=sys.stderr,
        )


def _interrupted(number: int, _: object) -> NoReturn:
    raise Interrupted(number)
