"""A new policy through SGLang's own endpoints for broadcasts: the driver's side.

The trainer's first rank and all ranks of the engines form a torch.distributed group (``/init_weights_update_group``),
through which the policy is broadcast in buckets (``/update_weights_from_distributed``), one request per bucket and
engine. `distributed_loader` verifies the buckets in the engines. Engines stand still meanwhile, for SGLang's schedulers
receive between two batches: an engine with room for it is better off with `weight_loader`, which stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_tpu.errors import RunError
from weight_sync import WeightSyncError
from weight_sync.ici.broadcast import Message, messages
from weight_sync.ici.links import Store
from weight_sync.ici.publication import Publication, read_publication

Post = Callable[[str, Mapping[str, Any], float], Awaitable[Any]]
"""``await post(path, body, timeout_s)``: the JSON answer of one engine. Raises RunError if it refuses or is gone."""
Request = tuple[str, Mapping[str, Any]]
"""Path and body."""
REASON_S = 2.0
"""How long to look for what the sender says about a broadcast that broke off."""


@dataclass
class BroadcastUpdates:
    """Updates of a set of engines by broadcasts of an ``ici`` sender.

    engines          how to reach each, by name. Between two updates engines may be taken out, put in or replaced
    tensor_parallel  ranks of each engine
    timeout_s        deadline of every request and of every wait for the sender
    """

    engines: dict[str, Post]
    tensor_parallel: int
    timeout_s: float
    _link: str | None = None
    _members: tuple[tuple[str, Post], ...] = ()
    _store: Store | None = None

    async def update(self, handle: Mapping[str, Any]) -> dict[str, str | None]:
        """Send the version to all engines, which stand still and have a weight update session open.

        By engine: None if it holds the version, or why it does not. An engine that refused the version before its last
        bucket was loaded holds what it held. Raises RunError if the sender cannot send it to anybody.
        """
        version = handle["version"]
        try:
            publication, number, answer = await asyncio.to_thread(self._ask, handle)
        except (WeightSyncError, RuntimeError, OSError) as error:  # a TimeoutError among them
            await self._forget()
            raise RunError(f"the trainer does not send policy version {version}: {error}") from None
        if answer.get("renew"):
            await self._forget()
            return await self.update(handle)
        if "error" in answer:
            raise RunError(f"the trainer does not send policy version {version}: {answer['error']}")

        failures: dict[str, str] = {}
        if "store" in answer:
            await self._everywhere(self._joining(answer["store"], publication.backend), failures)
        todo = messages(publication)
        for message in todo:
            if len(failures) < len(self.engines):  # those that refused it take part still, for the others' sake
                request = self._bucket(message, version, last=message is todo[-1])
                await self._everywhere(dict.fromkeys(self.engines, request), failures)
        if failures:
            reason = await asyncio.to_thread(self._reason, number)
            await self._forget()
            return {name: failures.get(name) and failures[name] + reason for name in self.engines}
        return dict.fromkeys(self.engines)

    def _ask(self, handle: Mapping[str, Any]) -> tuple[Publication, int, dict[str, Any]]:
        """Ask for the version: what the sender says about it, the request's number, and the answer."""
        address = tuple(handle["store"])
        if self._store is None or self._store.address != address:
            self._link, self._store = None, Store.connect(address, self.timeout_s)
        publication = read_publication(self._store, handle)
        members = tuple(self.engines.items())
        new = self._link is None or members != self._members
        if new:
            self._link, self._members = f"engines.{secrets.token_hex(8)}", members
        number = self._store.count("requests")
        request = {
            "kind": "broadcast",
            "number": number,
            "version": handle["version"],
            "sequence": handle["sequence"],
            "receivers": self.tensor_parallel * len(members),
            "link": self._link,
            "new": new,
        }
        self._store.put(f"request/{number}", request)
        return publication, number, self._store.take(f"answer/{number}", 2 * self.timeout_s)

    def _reason(self, number: int) -> str:
        """What the sender said about a broadcast that broke off, if anything."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            return f" ({self._store.take(f'failed/{number}', REASON_S)})"
        return ""

    def _joining(self, store: tuple[str, int], backend: str) -> dict[str, Request]:
        """How every engine comes into the group, in which the sender is rank 0."""
        return {
            name: (
                "/init_weights_update_group",
                {
                    "master_address": store[0],
                    "master_port": store[1],
                    "rank_offset": 1 + number * self.tensor_parallel,
                    "world_size": 1 + len(self.engines) * self.tensor_parallel,
                    "group_name": self._link,
                    "backend": backend,
                },
            )
            for number, name in enumerate(self.engines)
        }

    def _bucket(self, message: Message, version: int, last: bool) -> Request:
        body = {"group_name": self._link, "load_format": "flattened_bucket", "flush_cache": last}
        body |= {"weight_version": str(version)} if last else {}
        return "/update_weights_from_distributed", body | message.description()

    async def _everywhere(self, requests: Mapping[str, Request], failures: dict[str, str]) -> None:
        """Make the engines' requests at the same time; the first failure of each is kept."""
        names = list(requests)
        posts = (self.engines[name](*requests[name], self.timeout_s) for name in names)
        for name, outcome in zip(names, await asyncio.gather(*posts, return_exceptions=True), strict=True):
            if isinstance(outcome, RunError):
                failures.setdefault(name, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _forget(self) -> None:
        """Give up the group, in the engines as well."""
        link, self._link = self._link, None
        if link is None:
            return
        members = dict(self._members)
        leaving = (post("/destroy_weights_update_group", {"group_name": link}, REASON_S) for post in members.values())
        await asyncio.gather(*leaving, return_exceptions=True)  # an engine that is gone has left
