"""What goes on beside the loop: for how long anything of a kind was in progress, however much of it at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """Seconds in which the first of ``kinds`` was in progress, those in which only the second was, and so on.

    ``with activity("answering"): ...`` may overlap and nest; use it from one thread.
    """

    def __init__(self, *kinds: str) -> None:
        self._running = dict.fromkeys(kinds, 0)
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        self._account()
        self._running[kind] += 1
        try:
            yield
        finally:
            self._account()
            self._running[kind] -= 1

    def lap(self) -> dict[str, float]:
        """``perf/KIND_s`` since the last lap. They never sum to more than the time that passed."""
        self._account()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {f"perf/{kind}_s": value for kind, value in seconds.items()}

    def _account(self) -> None:
        now = time.perf_counter()
        if kind := next((kind for kind, count in self._running.items() if count), None):
            self._seconds[kind] += now - self._since
        self._since = now
