"""A new policy through SGLang's own endpoints for broadcasts: the driver's side.

The trainer's first rank and all ranks of the engines form a torch.distributed group (``/init_weights_update_group``),
through which the policy is broadcast in buckets (``/update_weights_from_distributed``), one request per bucket and
engine. `distributed_loader` verifies the buckets in the engines. Engines stand still meanwhile, for SGLang's schedulers
receive between two batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_tpu.errors import RunError
from rl_tpu.rollout.engine import EngineLostError, UpdateRefusedError
from rl_tpu.rollout.sglang import SGLangEngine, refusal_or_loss
from rl_tpu.rollout.weight_loader import MIXTURE, NOTHING_LOADED
from weight_sync import WeightSyncError
from weight_sync.ici.broadcast import Message, messages
from weight_sync.ici.links import Store
from weight_sync.ici.publication import Publication, read_publication

T = TypeVar("T")
Request = tuple[str, Mapping[str, Any]]
"""Path and body."""
Failure = UpdateRefusedError | EngineLostError
REASON_S = 2.0
"""How long to look for what the sender says about a broadcast that broke off."""
LEAST_S = 0.1
"""What a request gets when the deadline is that near."""


@dataclass
class BroadcastUpdates:
    """Updates of engines by broadcasts of an ``ici`` sender, one at a time.

    tensor_parallel  ranks of each engine
    timeout_s        deadline of every update
    flush_cache      whether engines empty their prefix caches, which they cannot while samples keep entries of it
    """

    tensor_parallel: int
    timeout_s: float
    flush_cache: bool = True
    _link: str | None = None
    _engines: tuple[SGLangEngine, ...] = ()
    _starts: tuple[int, ...] = ()
    """Of the engines' servers, when they came into the group."""
    _store: Store | None = None
    _deadline: float = 0.0

    async def read(self, handle: Mapping[str, Any]) -> Publication:
        """What the sender says about a version. Raises UpdateRefusedError if it does not send it."""
        address = tuple(handle["store"])
        if self._store is not None and self._store.address != address:
            await self._forget()
            self._store = None

        def read() -> Publication:
            self._store = self._store or Store.connect(address, self.timeout_s)
            return read_publication(self._store, handle)

        return await self._of_sender(handle["version"], read)

    async def send(
        self, handle: Mapping[str, Any], publication: Publication, engines: Sequence[SGLangEngine]
    ) -> dict[str, Failure | None]:
        """Send the version that was read to all engines, which stand still and have a weight update session open.

        By engine: None if it holds the version, or why it does not. Raises UpdateRefusedError if the sender cannot send
        it to anybody.
        """
        self._deadline = time.monotonic() + self.timeout_s
        version, starts = handle["version"], tuple(engine.starts for engine in engines)
        if (tuple(engines), starts) != (self._engines, self._starts):
            await self._forget()
            self._engines, self._starts = tuple(engines), starts
        number, answer = await self._of_sender(version, lambda: self._ask(handle))
        if answer.get("renew"):
            await self._forget()
            number, answer = await self._of_sender(version, lambda: self._ask(handle))
        if "error" in answer:
            raise _not_sent(version, answer["error"])

        failures = await self._broadcast(publication, answer.get("store"))
        if failures:
            reason = await asyncio.to_thread(self._reason, number)
            await self._forget()
            failures = {name: type(error)(f"{error}{reason}") for name, error in failures.items()}
        return {engine.name: failures.get(engine.name) for engine in engines}

    async def _of_sender(self, version: int, question: Callable[[], T]) -> T:
        """The sender's answer, waited for in a thread."""
        try:
            return await asyncio.to_thread(question)
        except (WeightSyncError, RuntimeError, OSError) as error:  # a TimeoutError among them
            self._store = None
            await self._forget()
            raise _not_sent(version, error) from None

    def _ask(self, handle: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Ask for the version: the request's number, and the answer."""
        new = self._link is None
        self._link = self._link or f"engines.{secrets.token_hex(8)}"
        number = self._store.count("requests")
        request = {
            "kind": "broadcast",
            "number": number,
            "version": handle["version"],
            "sequence": handle["sequence"],
            "receivers": self.tensor_parallel * len(self._engines),
            "link": self._link,
            "new": new,
        }
        self._store.put(f"request/{number}", request)
        return number, self._store.take(f"answer/{number}", self._left())

    async def _broadcast(self, publication: Publication, store: tuple[str, int] | None) -> dict[str, Failure]:
        """All buckets, through a group that is first made in ``store`` if one is given. Who does not hold the version."""
        failures: dict[str, Failure] = {}
        if store:
            await self._everywhere(self._joining(store, publication.backend), failures, _not_joined)
            if failures:
                return self._broken_off(failures, NOTHING_LOADED)
        *early, last = messages(publication)
        hashed = publication.manifest.tensors[0].xxh3_128 is not None
        for message in early:
            await self._everywhere(self._bucket(message), failures, refusal_or_loss)
            # An engine that only refused a bucket takes part still, for the others' sake.
            lost = any(isinstance(error, EngineLostError) for error in failures.values())
            if lost or len(failures) == len(self._engines):
                return self._broken_off(failures, NOTHING_LOADED if hashed else MIXTURE)
        final = {"flush_cache": self.flush_cache, "weight_version": str(publication.manifest.version)}
        await self._everywhere(self._bucket(last, **final), failures, refusal_or_loss)
        return failures

    def _broken_off(self, failures: Mapping[str, Failure], state: str) -> dict[str, Failure]:
        """The failures of all engines, those that did nothing wrong included."""
        first = next(iter(failures.values()))
        others = {engine.name: f"{engine.name}: the broadcast broke off ({state}): {first}" for engine in self._engines}
        kind = UpdateRefusedError if state == NOTHING_LOADED else EngineLostError
        return {name: failures.get(name) or kind(said) for name, said in others.items()}

    def _joining(self, store: tuple[str, int], backend: str) -> dict[str, Request]:
        """How every engine comes into the group, in which the sender is rank 0."""
        return {
            engine.name: (
                "/init_weights_update_group",
                {
                    "master_address": store[0],
                    "master_port": store[1],
                    "rank_offset": 1 + number * self.tensor_parallel,
                    "world_size": 1 + len(self._engines) * self.tensor_parallel,
                    "group_name": self._link,
                    "backend": backend,
                },
            )
            for number, engine in enumerate(self._engines)
        }

    def _bucket(self, message: Message, **more: Any) -> dict[str, Request]:
        """How every engine takes a bucket."""
        body = {"group_name": self._link, "load_format": "flattened_bucket", "flush_cache": False}
        request = "/update_weights_from_distributed", body | message.description() | more
        return {engine.name: request for engine in self._engines}

    async def _everywhere(
        self, requests: Mapping[str, Request], failures: dict[str, Failure], kind: Callable[[RunError], Failure]
    ) -> None:
        """Make the engines' requests at the same time; the first failure of each is kept, as what ``kind`` makes of it."""
        posts = (engine.post(*requests[engine.name], self._left()) for engine in self._engines)
        outcomes = await asyncio.gather(*posts, return_exceptions=True)
        for engine, outcome in zip(self._engines, outcomes, strict=True):
            if isinstance(outcome, RunError):
                failures.setdefault(engine.name, kind(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome

    def _left(self) -> float:
        """Seconds until the deadline."""
        return max(LEAST_S, self._deadline - time.monotonic())

    def _reason(self, number: int) -> str:
        """What the sender said about a broadcast that broke off, if anything."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            return f" ({self._store.take(f'failed/{number}', REASON_S)})"
        return ""

    async def _forget(self) -> None:
        """Give up the group, in the engines as well."""
        link, self._link = self._link, None
        if link is None:
            return
        leaving = (
            engine.post("/destroy_weights_update_group", {"group_name": link}, REASON_S) for engine in self._engines
        )
        await asyncio.gather(*leaving, return_exceptions=True)  # an engine that is gone has left


def _not_sent(version: int, reason: object) -> UpdateRefusedError:
    return UpdateRefusedError(f"the trainer does not send policy version {version}: {reason}")


def _not_joined(error: RunError) -> Failure:
    return error if isinstance(error, EngineLostError) else UpdateRefusedError(f"{error} ({NOTHING_LOADED})")
