"""Where sender and receiver ranks meet: a store of small values, and the process groups that are made through it.

The groups are built beside torch.distributed's default group, which may not exist or may belong to somebody else, and
leave its global state alone, so that any thread of any process can make one. A group that was given up closes its
connections: peers that wait for it then fail at once.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig, _DistributedBackendOptions

from weight_sync.deadlines import within
from weight_sync.errors import WeightSyncError

Result = TypeVar("Result")
POLL_S = 0.005
"""Between two looks at the store. (Its own wait writes a warning to stderr whenever it times out.)"""
PROBE_S = 5.0
"""Deadline of the connection that tells whether a store is there."""


class Store:
    """Small JSON values by key, served by sender rank 0. Every operation raises RuntimeError if that is gone, and
    TimeoutError if it does not answer; a TCPStore alone would wait for ever for a process that is frozen or cut off.

    timeout_s  of an operation; None: it waits, as in the process that serves the store
    """

    def __init__(self, store: dist.TCPStore, address: tuple[str, int], timeout_s: float | None = None):
        self._store, self._timeout_s = store, timeout_s
        self.address = address

    @classmethod
    def serve(cls, host: str, timeout_s: float) -> Store:
        """A new store on a free port, which others reach under ``host``. Raises ConnectionError for an unknown name."""
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise ConnectionError(f"host {host!r} cannot be found: {error}") from error
        store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), multi_tenant=False
        )
        return cls(store, (host, store.port))

    @classmethod
    def connect(cls, address: Sequence, timeout_s: float, patient: bool = False) -> Store:
        """Raises ConnectionError if nobody serves it. With ``patient`` only this has a deadline, not what follows."""
        host, port = address
        timeout = timedelta(seconds=timeout_s)
        try:
            socket.create_connection((host, port), min(timeout_s, PROBE_S)).close()  # TCPStore would go on trying
            store = within(
                timeout_s, lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            )
        except (OSError, RuntimeError) as error:
            raise ConnectionError(one_line(error)) from error
        return cls(store, (host, port), None if patient else timeout_s)

    def put(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(value, separators=(",", ":"))))

    def put_bytes(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get_bytes(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def get(self, key: str) -> Any:
        """The value, or None."""
        value = self.get_bytes(key)
        return None if value is None else json.loads(value)

    def take(self, key: str, timeout_s: float, readers: int = 1) -> Any:
        """Wait for the value; the last of the readers removes it. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {key} within {timeout_s:g} s")
            time.sleep(POLL_S)
        self.let_go(key, readers)
        return value

    def let_go(self, key: str, readers: int) -> None:
        """Called by each of the readers of a value: the last removes it."""
        if readers == 1 or self.count(f"{key}/read") == readers:
            self.delete(key)
            self.delete(f"{key}/read")

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter; its new value."""
        return self._ask(lambda: self._store.add(key, more))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def _ask(self, work: Callable[[], Result]) -> Result:
        return work() if self._timeout_s is None else within(self._timeout_s, work)


class Group:
    """Ranks that send each other flat uint8 tensors. Not for use by several threads at once."""

    def __init__(self, store: Store, name: str, rank: int, size: int, backend: str, timeout_s: float):
        """Meets the other ranks; raises RuntimeError if one does not come within ``timeout_s``.

        Other ranks may also come by way of ``torch.distributed.init_process_group`` with this name as a prefix of the
        store: it makes one backend under the first kind of device that the backend knows.
        """
        kind = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
        prefix = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store._store)))
        self._backend = _make_backend(backend, prefix, name, rank, size, timedelta(seconds=timeout_s))

    def send(self, data: torch.Tensor, rank: int) -> dist.Work:
        return self._backend.send([data], rank, 0)

    def receive(self, data: torch.Tensor, rank: int) -> dist.Work:
        return self._backend.recv([data], rank, 0)

    def broadcast(self, data: torch.Tensor) -> dist.Work:
        """From rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._backend.broadcast([data], options)


def _make_backend(
    backend: str, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta
) -> torch._C._distributed_c10d.Backend:
    if backend == Backend.GLOO:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if backend == Backend.NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = Backend._plugins.get(backend.upper())
    if plugin is None:
        raise WeightSyncError(f"torch.distributed knows no backend {backend!r} that makes groups from a store")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id, options.global_ranks_in_group = timeout, name, []
    return plugin.creator_fn(options, None)


def backend_for(backend: str, device: torch.device) -> str:
    """The one of ``backend``, as torch.distributed writes them (``gloo``, ``xpu:xccl,cpu:gloo``), that moves tensors of
    a device."""
    kinds = BackendConfig(Backend(backend)).get_device_backend_map()
    if device.type not in kinds:
        raise WeightSyncError(f"backend {backend} does not move tensors of {device.type}; it knows {', '.join(kinds)}")
    return kinds[device.type]


def one_line(error: BaseException) -> str:
    """The first line of a message, without the source position that libraries put in front."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line
