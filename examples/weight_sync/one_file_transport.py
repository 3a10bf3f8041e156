"""A transport of your own in one file: every version is a file that all ranks write into and receivers map.

    python -m weight_sync.bench --transport examples.weight_sync.one_file_transport:TRANSPORT --payload 100MB

It shows what a transport has to do: agree on a layout, write each rank's own regions, hash, hand out a handle; fetch,
verify, hand out tensors. ``shared_memory`` is the same idea with reused segments and parallel, pipelined copies.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from weight_sync import (
    Handle,
    Manifest,
    Received,
    Receiver,
    Sender,
    Shard,
    StaleHandleError,
    Transport,
    VerificationError,
)
from weight_sync.hashing import default_threads, hash_entries
from weight_sync.receiver import view_tensors, wrong_tensors
from weight_sync.sender import Ranks, Region, make_layout

DIRECTORY = tempfile.gettempdir()


class FileSender(Sender):
    """``directory`` is one that the ranks and the receivers see."""

    def __init__(self, run_id, rank=0, world_size=1, group=None, hashes=True, directory=DIRECTORY):
        self.manifest: Manifest | None = None
        self.stats: dict[str, float] = {}
        self._ranks, self._hashes, self._name = Ranks(rank, world_size, group), hashes, f"{directory}/{run_id}"
        self._paths: list[Path] = []

    def publish(self, version: int, shards: Iterable[Shard], whole: bool = False) -> Handle:
        mine = {Region.of(shard): shard for shard in shards}
        layout = make_layout(self._ranks.exchange(lambda: list(mine)))
        path = Path(f"{self._name}.{version}")

        def write() -> None:  # every rank writes regions that no other rank writes
            tensors = view_tensors(_map(path, layout.manifest, shared=True), layout.manifest)
            for region in layout.writes[self._ranks.rank]:
                spans = zip(region.offsets, region.shape, strict=True)
                tensors[region.name][tuple(slice(at, at + size) for at, size in spans)] = mine[region].data.detach()

        def hash_all() -> dict[str, str]:
            if self._ranks.rank != 0 or not self._hashes:
                return {}
            return hash_entries(_map(path, layout.manifest), layout.manifest.tensors, default_threads())

        self._ranks.exchange(write)  # whatever fails on one rank is raised on all
        hashes = self._ranks.exchange(hash_all)[0]
        entries = tuple(dataclasses.replace(e, xxh3_128=hashes.get(e.name)) for e in layout.manifest.tensors)
        self.manifest = dataclasses.replace(layout.manifest, version=version, tensors=entries)
        self._paths.append(path)
        if self._ranks.rank == 0:
            for old in self._paths[:-2]:  # the version before stays available
                old.unlink(missing_ok=True)
        self._paths = self._paths[-2:]
        return {"path": str(path), "version": version, "manifest": self.manifest.to_json()}

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


class FileReceiver(Receiver):
    def __init__(self, verify: bool = True):
        self._verify = verify

    def receive(self, handle: Handle) -> Received:
        path, version, manifest = Path(handle["path"]), handle["version"], Manifest.from_json(handle["manifest"])
        if not path.exists():
            raise StaleHandleError(f"version {version}: there is no {path} on {os.uname().nodename}")
        data = _map(path, manifest)
        if self._verify and (wrong := wrong_tensors(data, manifest.tensors, default_threads())):
            raise VerificationError(version, [entry.name for entry in wrong])
        return Received(version, manifest, view_tensors(data, manifest), check=lambda: None)  # never overwritten

    def close(self) -> None:
        pass


def _map(path: Path, manifest: Manifest, shared: bool = False) -> torch.Tensor:
    return torch.from_file(str(path), shared, manifest.total_bytes, dtype=torch.uint8)


TRANSPORT = Transport(FileSender, FileReceiver)
