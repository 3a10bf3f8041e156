"""Where requests go and in which order, without engines: each rule alone, then thousands of random events."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from rl_tpu.rollout import routing
from rl_tpu.rollout.routing import Router, Seat

CAPACITY = 4


class Engines:
    """A router over engines that can be lost and come back."""

    def __init__(self, *names: str, capacity: int = CAPACITY):
        self.serving = list(names)
        self.router = Router(names, capacity, lambda: self.serving)

    def change(self, *serving: str) -> None:
        self.serving[:] = serving
        self.router.changed()

    async def ask(self, samples: int = 1, tokens: int = 10, session: str | None = None, **more) -> asyncio.Task[Seat]:
        """A request that has got its place, or waits."""
        task = asyncio.create_task(self.router.seat(samples, tokens, session, **more))
        await settle()
        return task

    async def place(self, *request, **more) -> Seat:
        """The place of a request that need not wait."""
        return (await self.ask(*request, **more)).result()

    def empty(self) -> bool:
        return not (self.router.waiting or any(self.router.tokens.values()) or any(self.router.samples.values()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def on_loop(test):
    """Run a coroutine function as a test."""

    def sync():
        asyncio.run(test())

    sync.__name__, sync.__doc__ = test.__name__, test.__doc__
    return sync


@on_loop
async def test_the_engine_with_the_fewest_tokens():
    engines = Engines("a", "b", "c")
    places = [await engines.place(1, tokens) for tokens in (300, 100, 200, 10, 10)]
    assert [place.engine for place in places] == ["a", "b", "c", "b", "b"]
    assert engines.router.tokens == {"a": 300, "b": 120, "c": 200}
    engines.router.leave(places[0])
    assert (await engines.place()).engine == "a"


@on_loop
async def test_samples_leave_one_by_one():
    """What a request holds shrinks with every sample that is whole, and is nothing at its end, whatever it rounds to."""
    engines = Engines("a")
    seat = await engines.place(3, 100)
    assert (engines.router.samples["a"], engines.router.tokens["a"]) == (3, 99)
    with engines.router.taken(seat) as one_leaves:
        one_leaves()
        assert (engines.router.samples["a"], engines.router.tokens["a"]) == (2, 66)
    assert engines.empty()


@on_loop
async def test_a_session_stays_and_moves_only_if_its_engine_is_lost():
    engines = Engines("a", "b", capacity=100)
    assert (await engines.place(session="x")).engine == "a"
    assert (await engines.place(1, 5, session="y")).engine == "b"
    assert [(await engines.place(1, 1000, session="x")).engine for _ in range(3)] == ["a"] * 3
    engines.change("b")
    assert (await engines.place(session="x")).engine == "b"
    engines.change("a", "b")
    await engines.place(1, 5000)  # a is the less busy one again
    engines.router.leave(Seat("a", 1, 3010))
    assert (await engines.place(session="x")).engine == "b"


@on_loop
async def test_a_session_waits_for_its_full_engine_and_others_pass():
    engines = Engines("a", "b")
    first = await engines.place(CAPACITY, session="x")
    late = await engines.ask(session="x")
    assert not late.done()
    assert (await engines.place()).engine == "b"
    engines.router.leave(first)
    await settle()
    assert late.result().engine == "a"


@on_loop
async def test_a_waiting_session_moves_with_its_lost_engine():
    engines = Engines("a", "b")
    await engines.place(CAPACITY, session="x")
    late = await engines.ask(session="x")
    engines.change("b")
    await settle()
    assert late.result().engine == "b"


@on_loop
async def test_room_for_one_is_room_for_a_whole_request():
    """An engine with a free place is never idle; a full one gets nothing."""
    engines = Engines("a")
    await engines.place(CAPACITY - 1)
    large = await engines.place(8)
    waits = await engines.ask()
    assert engines.router.samples["a"] == CAPACITY + 7
    assert engines.router.waiting == 1
    engines.router.leave(large, 7)  # still full
    await settle()
    assert not waits.done()
    engines.router.leave(large)
    await settle()
    assert waits.done()


@on_loop
async def test_nobody_overtakes_on_the_engine_an_earlier_one_waits_for():
    engines = Engines("a")
    first = await engines.place(CAPACITY)
    waiting = [await engines.ask(samples) for samples in (8, 1, 1)]
    for done in ([], [0]):
        assert [i for i, task in enumerate(waiting) if task.done()] == done
        engines.router.leave(first)
        await settle()
    assert [task.done() for task in waiting] == [True, False, False]  # the eight fill it
    engines.router.leave(waiting[0].result(), 7)
    await settle()
    assert [task.done() for task in waiting] == [True, True, False]
    engines.router.leave(first)
    await settle()
    assert all(task.done() for task in waiting)


@on_loop
async def test_only_an_allowed_engine():
    """Also one that takes no other requests; a session does not move there."""
    engines = Engines("a", "b", "c")
    engines.change("a", "b")
    aside = frozenset({"c"})
    assert (await engines.place(session="x")).engine == "a"
    assert (await engines.place(CAPACITY, session="x", allowed=aside)).engine == "c"
    assert not (await engines.ask(allowed=aside)).done()
    assert (await engines.place(session="x")).engine == "a"


@on_loop
async def test_who_gives_up_while_it_waits_leaves_nothing():
    engines = Engines("a")
    first = await engines.place(CAPACITY)
    gives_up, next_one = await engines.ask(3), await engines.ask()
    gives_up.cancel()
    await settle()
    assert engines.router.waiting == 1
    engines.router.leave(first)
    await settle()
    assert next_one.done()
    engines.router.leave(first, CAPACITY - 1)
    engines.router.leave(next_one.result())
    assert engines.empty()


@pytest.mark.parametrize("order", ["place first", "cancelled first"])
def test_who_gives_up_as_its_place_comes_free_passes_it_on(order):
    """Both happen before the request runs again."""

    async def test():
        engines = Engines("a", capacity=1)
        first = await engines.place()
        gives_up, next_one = await engines.ask(), await engines.ask()
        if order == "place first":
            engines.router.leave(first)
            gives_up.cancel()
        else:
            gives_up.cancel()
            engines.router.leave(first)
        await settle()
        assert gives_up.cancelled()
        engines.router.leave(next_one.result())
        assert engines.empty()

    asyncio.run(test())


@on_loop
async def test_who_gives_up_as_it_is_refused_is_cancelled():
    engines = Engines("a", capacity=1)
    await engines.place()
    gives_up = await engines.ask()
    engines.router.fail(OSError("no engine is left"))
    gives_up.cancel()
    await settle()
    assert gives_up.cancelled()


@on_loop
async def test_the_end_of_waiting():
    """`fail` ends the wait of all; for one engine, of those that only it may serve."""
    engines = Engines("a", "b", capacity=1)
    for _ in engines.serving:
        await engines.place()
    anywhere, only_b, either = [
        await engines.ask(allowed=allowed) for allowed in (None, frozenset({"b"}), frozenset({"a", "b"}))
    ]
    engines.router.fail(OSError("b is lost"), "b")
    await settle()
    assert [task.done() for task in (anywhere, only_b, either)] == [False, True, False]
    assert str(only_b.exception()) == "b is lost"
    engines.router.fail(OSError("all are lost"))
    await settle()
    assert [str(task.exception()) for task in (anywhere, either)] == ["all are lost"] * 2
    assert engines.router.waiting == 0


@on_loop
async def test_no_engine_serves_for_a_while():
    engines = Engines("a")
    engines.change()
    waits = await engines.ask()
    assert not waits.done()
    engines.change("a")
    await settle()
    assert waits.result().engine == "a"


def test_the_oldest_sessions_are_forgotten(monkeypatch):
    monkeypatch.setattr(routing, "REMEMBERED_SESSIONS", 2)

    async def test():
        engines = Engines("a", "b", capacity=100)
        for session in ("x", "y", "x", "z"):  # y is the oldest, x was used since
            await engines.place(1, 10, session)
        assert engines.router.tokens == {"a": 20, "b": 20}
        await engines.place(1, 1000, "x")
        assert engines.router.tokens["a"] == 1020
        await engines.place(1, 5000)  # to b
        assert (await engines.place(1, 10, "y")).engine == "a"

    asyncio.run(test())


@dataclass
class Request:
    number: int
    samples: int
    tokens: int
    session: str | None
    task: asyncio.Task[Seat]
    left: int = 0
    """Samples that have a place and are not whole."""

    @property
    def seated(self) -> bool:
        return self.left > 0


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events(seed):
    """After each: what is in flight is what was placed and has not left; nobody waits beside a free engine; no engine
    was given a request while it was full, nor one that came later than another which waits for it."""
    dice = random.Random(seed)
    names = [f"engine {i}" for i in range(dice.randint(1, 4))]
    capacity = dice.choice([1, 4, 16])

    async def simulate():
        engines = Engines(*names, capacity=capacity)
        router, requests, homes = engines.router, [], {}
        count = 0

        def wanted(request: Request) -> list[str]:
            home = homes.get(request.session)
            return [home] if home in engines.serving else list(engines.serving)

        def event() -> None:
            nonlocal count
            waiting = [request for request in requests if not request.seated]
            seated = [request for request in requests if request.seated]
            kind = dice.choices(["ask", "leave", "give up", "engines"], [6, 9, 1, 0.3])[0]
            if kind == "ask" and len(waiting) < 20:
                session = dice.choice([None, *(f"session {i}" for i in range(8))])
                samples, tokens = dice.randint(1, 8), dice.randint(8, 4000)
                task = asyncio.create_task(router.seat(samples, tokens, session))
                requests.append(Request(count, samples, tokens, session, task))
                count += 1
            elif kind == "leave" and seated:
                request = dice.choice(seated)
                request.left -= 1
                router.leave(request.task.result())
                if not request.left:
                    requests.remove(request)
            elif kind == "give up" and waiting:
                request = dice.choice(waiting)
                request.task.cancel()
                requests.remove(request)
            elif kind == "engines":
                engines.change(*dice.sample(names, dice.randint(0, len(names))))

        async def check() -> None:
            before = {name: in_flight(name)[0] for name in names}
            await settle()
            new = [request for request in requests if request.task.done() and not request.seated]
            placed = dict.fromkeys(names, 0)
            for request in sorted(new, key=lambda request: request.number):
                engine = request.task.result().engine
                assert engine in wanted(request)
                assert before[engine] + placed[engine] < capacity
                placed[engine] += request.samples
                request.left = request.samples
                if request.session:
                    homes[request.session] = engine
            for request in requests:
                if not request.seated:
                    assert all(in_flight(name)[0] >= capacity for name in wanted(request))
                    later = [one for one in new if one.number > request.number]
                    assert not {one.task.result().engine for one in later} & set(wanted(request))
            for name in names:
                assert (router.samples[name], router.tokens[name]) == in_flight(name)
            assert router.waiting == sum(request.samples for request in requests if not request.seated)

        def in_flight(name: str) -> tuple[int, int]:
            here = [one for one in requests if one.seated and one.task.result().engine == name]
            return sum(one.left for one in here), sum(one.left * (one.tokens // one.samples) for one in here)

        for _ in range(2000):
            event()
            await check()
        engines.change(*names)
        await check()
        while requests:
            for request in [request for request in requests if request.seated]:
                router.leave(request.task.result(), request.left)
                requests.remove(request)
            await check()
        assert engines.empty()
        assert count > 200

    asyncio.run(simulate())
