"""Which engine a request goes to, and when.

A session (all samples of a prompt, over all their turns) stays on one engine, which then reads what they have in common once.
Everything else goes to the engine with the fewest tokens in flight. An engine that decodes as many samples as it can gets
no more until one of them is whole: what waits does so here, in order, and goes to another engine if one breaks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

REMEMBERED_SESSIONS = 100_000
"""The engine of so many sessions is known; an older one goes where there is least to do."""


@dataclass
class Seat:
    """A request's place on an engine. `leave` it once for each of its samples."""

    engine: str
    samples: int
    tokens: int
    """Of all its samples together, at most."""

    @property
    def tokens_per_sample(self) -> int:
        return self.tokens // self.samples


@dataclass(eq=False)
class _Waiting:
    session: str | None
    samples: int
    tokens: int
    allowed: frozenset[str] | None
    seat: asyncio.Future[Seat] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Router:
    """``serving`` tells the names of the engines that take requests just now; call `changed` when it tells others.

    tokens, samples  in flight on each engine
    """

    def __init__(self, engines: Sequence[str], capacity: int, serving: Callable[[], Sequence[str]]):
        """``capacity``: samples that an engine decodes at once."""
        self.tokens = dict.fromkeys(engines, 0)
        self.samples = dict.fromkeys(engines, 0)
        self._capacity, self._serving = capacity, serving
        self._waiting: deque[_Waiting] = deque()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Samples that wait for an engine."""
        return sum(request.samples for request in self._waiting)

    async def seat(
        self, samples: int, tokens: int, session: str | None = None, allowed: frozenset[str] | None = None
    ) -> Seat:
        """Wait for a place for a request, on one of the ``allowed`` engines if any are named."""
        request = _Waiting(session, samples, tokens, allowed)
        self._waiting.append(request)
        self.changed()
        try:
            return await request.seat
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            elif not request.seat.cancelled() and request.seat.exception() is None:
                self.leave(request.seat.result(), samples)
            raise

    def leave(self, seat: Seat, samples: int = 1) -> None:
        """So many samples of a request need the engine no more."""
        self.samples[seat.engine] -= samples
        self.tokens[seat.engine] -= samples * seat.tokens_per_sample
        self.changed()

    @contextmanager
    def taken(self, seat: Seat) -> Iterator[Callable[[], None]]:
        """Hold a seat; call what it gives for every sample that is whole. The others leave at the end."""
        left = seat.samples

        def one_leaves() -> None:
            nonlocal left
            left -= 1
            self.leave(seat)

        try:
            yield one_leaves
        finally:
            if left:
                self.leave(seat, left)

    def changed(self) -> None:
        """Give places to those that wait, in order. An engine that is full for one of them is so for all later ones."""
        serving = list(self._serving())
        still: deque[_Waiting] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            if request.seat.done():
                continue
            home = self._sessions.get(request.session) if request.session else None
            at_home = home in serving and request.allowed is None
            wanted = [home] if at_home else request.allowed or serving
            free = [name for name in wanted if self.samples[name] < self._capacity]
            if free:
                self._place(request, min(free, key=self.tokens.__getitem__))
            else:
                still.append(request)
        self._waiting = still

    def fail(self, error: Exception, engine: str | None = None) -> None:
        """Nothing will come free: end the wait of all, or of those that only this engine may serve."""
        for request in list(self._waiting):
            if not request.seat.done() and (engine is None or request.allowed == {engine}):
                request.seat.set_exception(error)
                self._waiting.remove(request)

    def _place(self, request: _Waiting, engine: str) -> None:
        # Whoever finds a free place brings all its samples: the engine itself lets the last ones wait, and never idles.
        tokens = request.tokens // request.samples * request.samples
        self.samples[engine] += request.samples
        self.tokens[engine] += tokens
        if request.session and request.allowed is None:
            self._sessions[request.session] = engine
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > REMEMBERED_SESSIONS:
                self._sessions.popitem(last=False)
        request.seat.set_result(Seat(engine, request.samples, tokens))
