"""The protocol every way of moving weights follows, and the registry they are found in by name.

A sender is opened by every rank that holds a part of the policy, a receiver by every engine process. All that travels
between them outside the transport is a handle: a small JSON-able dict that ``publish`` returns and ``receive`` takes.

A new transport is one file and one line in ``TRANSPORTS``. A package of its own registers in the entry point group
``weight_sync.transports``; an import path ``package.module:attribute`` works as a name without registration.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.manifest import Manifest
from weight_sync.shard import Shard

Handle = dict[str, Any]


@dataclass
class Received:
    """One policy version as it arrived, whole, and verified unless the receiver was opened with ``verify=False``.

    ``tensors`` may be views of memory that the sender will reuse: load them, then call ``check`` and serve the version
    only if it returns. As a context manager it calls ``check`` at the end of the block:

        with receiver.receive(handle) as received:
            model.load_weights(received.tensors.items())
        # here every byte that was loaded is a byte of received.version
    """

    version: int
    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    check: Callable[[], None]
    """Raises StaleHandleError if the weights were overwritten since they were received."""
    stats: dict[str, float] = field(default_factory=dict)
    """Seconds (``*_s``) and bytes (``*_bytes``) of the parts of this transfer."""

    def __enter__(self) -> Received:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.check()


class Sender(Protocol):
    """One rank's end. All ranks of the group call the same methods in the same order, each from one thread at a time.

    Every sender takes these options, and its own:

    run_id            name of the run; what the transport leaves behind can be told by it
    rank, world_size  among the processes that publish together
    group             their torch.distributed group with a CPU backend, if they are several; its timeout bounds all waits
                      for each other
    hashes            whether to hash every tensor, which a verifying receiver needs
    """

    manifest: Manifest | None
    """Of the version published last, on every rank; ``manifest.diff`` of two versions names what did not change."""
    stats: dict[str, float]
    """Seconds (``*_s``) and bytes (``*_bytes``) of the parts of the last publish, as seen by this rank."""

    def publish(self, version: int, shards: Iterable[Shard], whole: bool = False) -> Handle:
        """Collective. Make ``version`` available from the shards of all ranks; return the handle on every rank.

        A region that several ranks hold (replicated parameters) is written once. The shards' data may change as soon as
        this returns. With ``whole`` the version does not build on earlier ones, so that a receiver whose own copy is
        lost or damaged can take it; the same version may be published again.

        Raises CoverageError, naming the tensor, if regions are missing or overlap; an error of one rank is raised on
        all. What was published before stays available until the publish after the next, unless the transport was told
        to keep less or the shards' layout changes.
        """

    def close(self) -> None:
        """Give everything back. Handles are void from here on. Not collective."""


class Receiver(Protocol):
    """An engine process' end, for one thread at a time. Every receiver takes ``verify``, and options of its own."""

    def receive(self, handle: Handle) -> Received:
        """Fetch and verify a version. Raises WeightSyncError (StaleHandleError, VerificationError) before any tensor is
        handed out; the next ``receive`` may work."""

    def close(self) -> None:
        """Let go of what is kept between versions. Tensors received before stay readable."""


class Transport(NamedTuple):
    """What a transport registers: how its two ends are opened."""

    open_sender: Callable[..., Sender]
    open_receiver: Callable[..., Receiver]


ENTRY_POINT_GROUP = "weight_sync.transports"

TRANSPORTS = {
    "shared_memory": "weight_sync.shared_memory:TRANSPORT",
    "disk": "weight_sync.disk:TRANSPORT",
    "disk_delta": "weight_sync.disk:DELTA_TRANSPORT",
    "ici": "weight_sync.ici:TRANSPORT",
}


def find_transport(name: str) -> Transport:
    """A transport by registered name or by import path (``package.module:attribute``)."""
    third_party = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    path = name if ":" in name else (third_party | TRANSPORTS).get(name)
    if path is None:
        known = ", ".join(sorted(third_party.keys() | TRANSPORTS.keys()))
        raise WeightSyncError(f"unknown weight transport {name!r}; known: {known}; or give package.module:attribute")
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise WeightSyncError(f"weight transport {name!r} cannot be imported from {path}: {error}") from error


def open_sender(name: str, **options: Any) -> Sender:
    """The sending end of transport ``name``; the options are those of its sender."""
    return find_transport(name).open_sender(**options)


def open_receiver(name: str, **options: Any) -> Receiver:
    """The receiving end of transport ``name``; the options are those of its receiver."""
    return find_transport(name).open_receiver(**options)
