"""Deadlines for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(timeout_s: float, work: Callable[[], Result]) -> Result:
    """The result of ``work``, or what it raises. Raises TimeoutError if it takes longer; its thread is left behind then."""
    result: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="weight_sync with a deadline")
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return result[0]
