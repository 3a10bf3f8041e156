"""Calling what somebody else wrote, sync or async, without ever blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """A call took longer than its deadline."""


async def call(function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> Any:
    """The result of a function, or of a coroutine function. Raises what it raises, or TimeLimitError after ``timeout_s``.

    A plain function runs in a thread of its own. One that hangs is left alone after its time: it cannot be ended, but
    holds up neither others nor the end of the process. What must be ended, and what computes for long, belongs in a process.
    """
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            result = await _in_thread(lambda: function(*arguments))
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimeLimitError(f"no answer within {timeout_s:g} s") from None


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first error ends the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _in_thread(work: Callable[[], Any]) -> Awaitable[Any]:
    """Not asyncio.to_thread: its few threads are shared, and Python waits for them at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # SystemExit as well: it means the function, not this process
            usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if usual else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="environment-call", daemon=True).start()
    return future
