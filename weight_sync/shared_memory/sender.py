"""The trainer's end of shared memory: every rank copies its own regions into a segment, and the ranks hash it together."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from weight_sync.errors import WeightSyncError, require_positive
from weight_sync.hashing import default_threads, in_threads, xxh3_128
from weight_sync.manifest import Manifest, aligned
from weight_sync.receiver import view_tensors
from weight_sync.sender import Layout, Ranks, Region, agree, hash_together, make_layout, stats_of
from weight_sync.shard import Shard
from weight_sync.shared_memory.copying import Copy, bytes_of, copy_tensors
from weight_sync.shared_memory.segments import (
    DIRECTORY,
    PAGE_BYTES,
    Segment,
    SegmentName,
    remove_stale_segments,
    require_run_id,
)
from weight_sync.shared_memory.space import require_space
from weight_sync.transport import Handle, Sender

HASH_DIGITS = 32
MANIFEST_SLACK_BYTES = 64
"""Beside its hashes only the digits of the version make a manifest longer than its layout's."""


class SharedMemorySender(Sender):
    """One rank of a sender; ``run_id`` names the segments, all ranks are on one host.

    slots      segments: 2 keep the previous version readable while the next is written, 1 saves the memory of one
    hashes     whether to hash every tensor, which a verifying receiver needs
    threads    for copies and hashes; default: this rank's share of the cores, at most 8
    directory  where the segments are: a memory file system that sender and receivers see under the same path
    """

    def __init__(
        self,
        run_id: str,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        slots: int = 2,
        hashes: bool = True,
        threads: int | None = None,
        directory: str | os.PathLike = DIRECTORY,
    ):
        require_run_id(run_id)
        require_positive(slots=slots, threads=threads)
        self.manifest: Manifest | None = None
        self.stats: dict[str, float] = {}
        self._ranks = Ranks(rank, world_size, group)
        self._run_id = run_id
        self._slots = slots
        self._hashes = hashes
        self._threads = threads or default_threads(world_size)
        self._directory = Path(directory)
        self._segments: list[Segment] = []
        self._targets: list[dict[Region, torch.Tensor]] = []  # by slot: where this rank writes, largest first
        self._layout: Layout | None = None
        self._digests: list[str] = []  # by rank: of the regions the layout was made from
        self._hashed_ahead: dict[Region, str] = {}
        self._sequence = 0
        self._next_slot = 0

    def publish(self, version: int, shards: Iterable[Shard], whole: bool = False) -> Handle:
        start = time.perf_counter()
        ahead, self._hashed_ahead = self._hashed_ahead, {}
        self._sequence += 1
        if self._segments and self._ranks.rank == 0:
            self._segments[self._next_slot].begin_write(self._sequence)
        mine = self._agree(version, shards)
        segment = self._segments[self._next_slot]
        agreed = time.perf_counter()

        written = self._ranks.exchange(lambda: self._write(mine, ahead))
        copied = time.perf_counter()

        manifest = dataclasses.replace(self._layout.manifest, version=version)
        if self._hashes:
            known = {name: value for hashes in written for name, value in hashes.items()}
            manifest = hash_together(self._ranks, manifest, segment.data, self._threads, known)
        text = manifest.to_json().encode()
        self._ranks.exchange(lambda: self._finish(segment, manifest, text))

        self.manifest = manifest
        self.stats = stats_of(manifest, start, agreed, copied, time.perf_counter())
        self._next_slot = (self._next_slot + 1) % self._slots
        return {
            "transport": "shared_memory",
            "version": version,
            "host": os.uname().nodename,
            "path": str(segment.path),
            "sequence": self._sequence,
            "manifest_offset": _manifest_offset(manifest),
            "manifest_bytes": len(text),
            "manifest_xxh3_128": xxh3_128(text),
        }

    def hash_ahead(self, shards: Iterable[Shard]) -> None:
        """Hash whole tensors of this rank now, in the time before ``publish``, which then only has to copy them.

        Not collective. It counts for the next publish and for shards that are whole, contiguous, on the CPU and
        published in their own dtype. If one changes before it is published, receivers refuse that version and name it.
        """
        ready = [shard for shard in shards if _can_be_hashed_ahead(shard)]
        hashes = in_threads(lambda shard: xxh3_128(bytes_of(shard.data.detach())), ready, self._threads)
        self._hashed_ahead = {Region.of(shard): value for shard, value in zip(ready, hashes, strict=True)}

    def close(self) -> None:
        """Rank 0 removes the files; receivers that have them mapped can finish reading."""
        if self._ranks.rank == 0:
            for segment in self._segments:
                segment.unlink()
        self._segments, self._targets, self._layout, self._digests = [], [], None, []

    def _agree(self, version: int, shards: Iterable[Shard]) -> dict[Region, Shard]:
        """Collective: this rank's shards by region, once segments laid out for all ranks' shards are there."""
        # The files are gone if somebody cleaned up.
        agreed = agree(
            self._ranks, version, shards, self._sequence, lambda: all(s.path.exists() for s in self._segments)
        )
        if agreed.digests != self._digests or not all(agreed.notes):
            self._allocate(make_layout(self._ranks.exchange(lambda: agreed.regions)))
            self._digests = agreed.digests
        return agreed.shards

    def _allocate(self, layout: Layout) -> None:
        """Collective: segments for the layout, with every page that this rank will write touched."""
        self._ranks.exchange(self.close)  # on every rank before the first looks for space
        longer = len(layout.manifest.tensors) * HASH_DIGITS + MANIFEST_SLACK_BYTES
        nbytes = _manifest_offset(layout.manifest) + len(layout.manifest.to_json()) + longer

        def create() -> list[Path]:
            if self._ranks.rank == 0:
                remove_stale_segments(self._directory)
                require_space(self._slots, nbytes, self._directory)
                for name in SegmentName.new(self._run_id, self._slots):
                    self._segments.append(Segment.create(self._directory / str(name), nbytes))
                    self._segments[-1].begin_write(self._sequence)
            return [segment.path for segment in self._segments]

        def touch(paths: list[Path]) -> None:
            if self._ranks.rank != 0:
                self._segments = [Segment.share(path) for path in paths]
            for segment in self._segments:
                tensors = view_tensors(segment.data, layout.manifest)
                self._targets.append(
                    {region: tensors[region.name][region.slices] for region in layout.writes[self._ranks.rank]}
                )
                in_threads(torch.Tensor.zero_, self._targets[-1].values(), self._threads)

        try:
            paths = self._ranks.exchange(create)[0]
            self._ranks.exchange(lambda: touch(paths))
        except WeightSyncError:
            self.close()
            raise
        self._layout, self._next_slot = layout, 0

    def _write(self, shards: dict[Region, Shard], ahead: dict[Region, str]) -> dict[str, str]:
        """Copies what this rank writes; the hashes of the tensors that were hashed ahead or on the way."""
        targets = self._targets[self._next_slot]
        copies = [
            Copy(
                region.name,
                target,
                shards[region].data.detach(),
                self._hashes and region.is_whole and region not in ahead,
            )
            for region, target in targets.items()
        ]
        hashed = copy_tensors(copies, self._threads)
        return hashed | {region.name: value for region, value in ahead.items() if region in targets}

    def _finish(self, segment: Segment, manifest: Manifest, text: bytes) -> None:
        if self._ranks.rank == 0:
            target = segment.data[_manifest_offset(manifest) :][: len(text)]
            target.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            segment.end_write(self._sequence)


def _can_be_hashed_ahead(shard: Shard) -> bool:
    data = shard.data
    return Region.of(shard).is_whole and data.is_cpu and data.dtype == shard.dtype and data.is_contiguous()


def _manifest_offset(manifest: Manifest) -> int:
    """On a page without data: a receiver that wrote to a tensor would see a private copy of a shared one for ever."""
    return aligned(manifest.total_bytes, PAGE_BYTES)
