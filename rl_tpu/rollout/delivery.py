"""The ways of a published policy into engines (``weight_sync.delivery``)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError
from rl_tpu.rollout.distributed import BroadcastUpdates
from rl_tpu.rollout.engine import Engine, WeightUpdate
from rl_tpu.rollout.sglang import SGLangEngine


class Delivery(ABC):
    """May be used for several sets of engines at the same time; an engine is in one of them only.

    begun, ended  loads so far, of all engines
    """

    def __init__(self) -> None:
        self.begun = self.ended = 0

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        finally:
            self.ended += 1

    @abstractmethod
    def deliver(
        self, engines: Sequence[Engine], handle: Mapping[str, Any], version: int
    ) -> list[Awaitable[WeightUpdate]]:
        """Bring policy ``version``, which weight_sync published as ``handle``, to all of the engines.

        By engine: how it came by the version, or UpdateRefusedError or EngineLostError, as `Engine.load` raises them.
        All must be awaited, and at the same time.
        """


def make_delivery(config: RunConfig) -> Delivery:
    sync = config.weight_sync
    if sync.delivery == "staged":
        return Staged()
    # Samples that keep their entries pin the cache; `prefix_cache` keeps new ones away from them.
    flush_cache = sync.pause_mode != "in_place"
    return Broadcast(BroadcastUpdates(config.rollout.tensor_parallel, sync.timeout_s, flush_cache))


class Staged(Delivery):
    """Each engine fetches and verifies the policy by itself while it generates, and pauses only to load it."""

    def deliver(
        self, engines: Sequence[Engine], handle: Mapping[str, Any], version: int
    ) -> list[Awaitable[WeightUpdate]]:
        return [self._take(engine, handle, version) for engine in engines]

    async def _take(self, engine: Engine, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        staged = await engine.stage(handle, version)
        with self._loading():
            return await engine.load(staged)


class Broadcast(Delivery):
    """One copy of the policy leaves the trainer, for all engines at once, which stand still together for it."""

    def __init__(self, updates: BroadcastUpdates) -> None:
        super().__init__()
        self._updates = updates
        self._turn = asyncio.Lock()

    def deliver(
        self, engines: Sequence[SGLangEngine], handle: Mapping[str, Any], version: int
    ) -> list[Awaitable[WeightUpdate]]:
        if not engines:
            return []
        together = asyncio.create_task(self._deliver(engines, handle, version))

        async def outcome_of(number: int) -> WeightUpdate:
            outcome = (await together)[number]
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return [outcome_of(number) for number in range(len(engines))]

    async def _deliver(
        self, engines: Sequence[SGLangEngine], handle: Mapping[str, Any], version: int
    ) -> list[WeightUpdate | BaseException]:
        async with self._turn:
            publication = await self._updates.read(handle)
            tensors = publication.manifest.tensors
            update = WeightUpdate(version, len(tensors), sum(entry.nbytes for entry in tensors), stage_seconds=0.0)
            transfer = Transfer(engines, lambda standing: self._updates.send(handle, publication, standing))
            takes = (self._take(engine, transfer, update) for engine in engines)
            return await asyncio.gather(*takes, return_exceptions=True)

    async def _take(self, engine: SGLangEngine, transfer: Transfer, update: WeightUpdate) -> WeightUpdate:
        try:
            with self._loading():
                seconds = await engine.stand_still(lambda: transfer.join(engine))
        finally:
            transfer.settle(engine)  # it may never have stood still
        return dataclasses.replace(update, pause_seconds=seconds)


class Transfer:
    """Is made by ``send`` as soon as each of the engines stands still or has failed to, to those that do."""

    def __init__(
        self,
        engines: Sequence[SGLangEngine],
        send: Callable[[Sequence[SGLangEngine]], Awaitable[Mapping[str, RunError | None]]],
    ):
        self._engines = engines
        self._send = send
        self._awaited = {engine.name for engine in engines}
        self._standing: set[str] = set()
        self._complete = asyncio.Event()
        self._sending: asyncio.Task | None = None

    async def join(self, engine: SGLangEngine) -> None:
        """Take part with an engine that stands still. Raises why it did not get the policy."""
        self._standing.add(engine.name)
        self.settle(engine)
        await self._complete.wait()
        if error := (await self._sending)[engine.name]:
            raise error

    def settle(self, engine: SGLangEngine) -> None:
        """Nobody waits for the engine any more: it has joined, or never will."""
        self._awaited.discard(engine.name)
        if not self._awaited and not self._complete.is_set():
            if self._standing:
                standing = [engine for engine in self._engines if engine.name in self._standing]
                self._sending = asyncio.create_task(self._send(standing))
            self._complete.set()
