"""The trainer's end of weights through storage: ranks share out the tensors, write their files and commit together."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.disk.checkpoint_files import INDEX_FILE, FilePlan, companion_files, index_json, plan_files
from weight_sync.disk.gather import Gatherer, Ownership, assign_owners
from weight_sync.disk.storage import open_store
from weight_sync.disk.versions import LATEST_FILE, History, Link, Record, directory_name
from weight_sync.disk.writer import VersionWriter, Written
from weight_sync.errors import StaleHandleError, WeightSyncError, require_positive
from weight_sync.hashing import default_threads, xxh3_128
from weight_sync.manifest import Manifest, TensorEntry, aligned
from weight_sync.portions import batches
from weight_sync.sender import Ranks, Region, agree, make_layout
from weight_sync.shard import Shard
from weight_sync.transport import Handle, Sender

COMMIT_BYTES = 2**20
"""Room for the headers and the commit file of a full version."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What follows from the ranks' shards; kept as long as those look the same."""

    digests: list[str]
    layout: Manifest
    ownership: Ownership
    files: list[list[FilePlan]]
    """By owner."""
    rounds: list[list[list[TensorEntry]]]
    """By round and owner: the bucket that the owner makes."""


class DiskSender(Sender):
    """One rank of a sender. One sender at a time writes to a ``url``.

    url              a path or fsspec URL that all ranks see
    model_dir        local directory whose configuration and tokenizer files complete the checkpoint; None: only weights
    keep             versions that stay, with what they build on; while one is written there is one more
    full_every       1: full versions only; n: after a full version n - 1 deltas, which costs every rank the memory of
                     its share of the model
    level            of zstd for deltas
    storage_options  for fsspec. They travel in the handle: leave secrets to the environment
    fsync            whether a version is on the disk, not only in the page cache, before it appears (local paths)
    timeout_s        for each request to a remote store
    file_bytes       about the size of a safetensors file
    bucket_bytes     of tensors that a rank makes at a time; it holds up to four such buckets
    hashes           whether to hash every tensor, which a verifying receiver needs
    threads          for hashes and compression; default: this rank's share of the cores, at most 8
    """

    def __init__(
        self,
        run_id: str,
        url: str,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        model_dir: str | None = None,
        keep: int = 2,
        full_every: int = 1,
        level: int = 1,
        storage_options: dict[str, Any] | None = None,
        fsync: bool = True,
        timeout_s: float = 120,
        file_bytes: int = 4 * 2**30,
        bucket_bytes: int = 256 * 2**20,
        hashes: bool = True,
        threads: int | None = None,
    ):
        require_positive(
            keep=keep,
            full_every=full_every,
            timeout_s=timeout_s,
            file_bytes=file_bytes,
            bucket_bytes=bucket_bytes,
            threads=threads,
        )
        self.manifest: Manifest | None = None
        self.stats: dict[str, float] = {}
        self._ranks = Ranks(rank, world_size, group)
        self._store = open_store(url, storage_options, timeout_s, fsync)
        self._run_id = run_id
        self._storage_options = storage_options or {}
        self._model_dir = Path(model_dir) if model_dir else None
        self._keep, self._full_every, self._level = keep, full_every, level
        self._file_bytes, self._bucket_bytes = file_bytes, bucket_bytes
        self._hashes = hashes
        self._threads = threads or default_threads(world_size)
        self._gatherer = Gatherer(rank, group)
        self._history: History | None = None
        self._small_files: dict[str, bytes] = {}
        """Of the full version being written, beside its tensors."""
        self._plan: _Plan | None = None
        self._chain: list[Link] = []
        """The full version that the next delta builds on, and the deltas since; empty: the next must be full."""
        self._previous: dict[str, torch.Tensor] = {}
        """Bytes of the version before, of the tensors this rank owns."""

    def publish(self, version: int, shards: Iterable[Shard], whole: bool = False) -> Handle:
        start = time.perf_counter()
        mine = self._agree(version, shards, whole)
        if len(self._chain) >= self._full_every:
            self._chain = []
        # Until the version is committed there is none that the next could build on: the bytes kept are in between.
        chain, self._chain = tuple(self._chain), []
        directory, number = self._ranks.exchange(lambda: self._begin(version, bool(chain)))[0]
        writer = self._open_writer(directory, bool(chain))
        try:
            self._ranks.exchange(lambda: self._store.require_begun(directory))
            agreed = time.perf_counter()
            self._write(writer, mine)
            parts = self._ranks.exchange(writer.finish)
            written = time.perf_counter()
            record = self._record(version, number, chain, parts)
            text = record.to_json()
            self._ranks.exchange(lambda: self._commit(directory, record, text))
        except BaseException:
            writer.abandon()
            self._gatherer.release()
            if self._ranks.rank == 0:
                self._store.discard(directory)
                self._history = None  # look again at what is there, and remove what was left
                self._store.release()
            raise
        link = Link(directory, xxh3_128(text))
        if self._full_every > 1:
            self._chain = [*chain, link]
        handle = self._handle(record, link)
        self._ranks.exchange(lambda: self._point_to(handle))
        end = time.perf_counter()
        self.manifest = record.manifest
        self.stats = writer.seconds | {
            "prepare_s": agreed - start,
            "write_s": written - agreed,
            "commit_s": end - written,
            "total_s": end - start,
            "total_bytes": record.manifest.total_bytes,
            "wire_bytes": sum(nbytes for file in record.files.values() for _, nbytes in file.tensors.values()),
        }
        return handle

    def close(self) -> None:
        """Versions stay where they are."""
        self._previous, self._chain, self._plan = {}, [], None
        self._gatherer = Gatherer(self._gatherer.rank, self._gatherer.group)
        self._history = None
        self._store.release()

    def _agree(self, version: int, shards: Iterable[Shard], whole: bool) -> dict[Region, Shard]:
        """Collective: this rank's shards by region, once there is a plan for all ranks' shards. The chain ends if one
        rank asks for a whole version."""
        agreed = agree(self._ranks, version, shards, note=lambda: whole)
        if any(agreed.notes):
            self._chain = []
        if self._plan is None or self._plan.digests != agreed.digests:
            regions = self._ranks.exchange(lambda: agreed.regions)
            self._plan = self._make_plan(agreed.digests, regions)
            self._chain, self._previous = [], {}
        return agreed.shards

    def _make_plan(self, digests: list[str], regions: list[list[Region]]) -> _Plan:
        layout = make_layout(regions).manifest
        ownership = assign_owners(regions, layout.tensors)
        files = plan_files(ownership.owned, self._file_bytes)
        buckets = [
            [b for file in own for b in batches(file.entries, self._bucket_bytes, size=aligned)] for own in files
        ]
        count = max(map(len, buckets))
        rounds = [[own[number] if number < len(own) else [] for own in buckets] for number in range(count)]
        return _Plan(digests, layout, ownership, files, rounds)

    def _begin(self, version: int, is_delta: bool) -> tuple[str, int]:
        """Rank 0: the name and number of a new directory, which is there for all ranks, hidden from readers."""
        if self._ranks.rank != 0:
            return "", 0
        if not is_delta:
            self._small_files = companion_files(self._model_dir, {e.dtype for e in self._plan.layout.tensors})
            self._small_files[INDEX_FILE] = index_json([file for own in self._plan.files for file in own])
        if self._history is None:
            self._store.claim()
            self._store.remove_leftovers()
            self._history = History(self._store)
        if not is_delta:  # how large a delta will be is not known
            small = sum(map(len, self._small_files.values()))
            tensors = sum(entry.nbytes for entry in self._plan.layout.tensors)
            self._store.require_space(tensors + small + COMMIT_BYTES)
        directory = directory_name(version, is_delta, self._history.directories)
        self._store.begin(directory)
        return directory, self._history.next_publish

    def _open_writer(self, directory: str, is_delta: bool) -> VersionWriter:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        files = self._plan.files[rank]
        if is_delta:
            files = [FilePlan(f"delta-{rank + 1:05d}-of-{world_size:05d}.zst", self._plan.ownership.owned[rank])]
        previous = self._previous if self._full_every > 1 else None
        return VersionWriter(
            self._store, directory, files, previous, is_delta, self._hashes, self._level, self._threads
        )

    def _write(self, writer: VersionWriter, mine: dict[Region, Shard]) -> None:
        """Collective: every rank makes the tensors it owns and writes them while the next ones are gathered."""
        plan, gatherer = self._plan, self._gatherer
        for buckets in plan.rounds:

            def stage(buckets=buckets) -> None:
                writer.wait(unfinished=1)  # the buffers of the round before the last are used again
                gatherer.stage(plan.ownership.pieces, buckets, mine)

            self._ranks.exchange(stage)
            writer.submit(buckets[self._ranks.rank], gatherer.swap())
        gatherer.release()

    def _record(self, version: int, number: int, chain: tuple[Link, ...], parts: list[Written]) -> Record:
        hashes, files = {}, {}
        for part in parts:
            hashes |= part.hashes
            files |= part.files
        manifest = dataclasses.replace(self._plan.layout, version=version).with_hashes(hashes)
        return Record(self._run_id, number, manifest, chain, files)

    def _commit(self, directory: str, record: Record, text: bytes) -> None:
        """Rank 0: what belongs to the whole version, then the version itself."""
        if self._ranks.rank != 0:
            return
        if not record.is_delta:
            for name, data in self._small_files.items():
                self._store.put(directory, name, data)
        self._store.commit(directory, text)
        self._history.add(directory, record)

    def _handle(self, record: Record, link: Link) -> Handle:
        return {
            "transport": "disk",
            "version": record.manifest.version,
            "kind": "delta" if record.is_delta else "full",
            "url": str(self._store),
            "storage_options": self._storage_options,
            "directory": link.directory,
            "record_xxh3_128": link.record_xxh3_128,
        }

    def _point_to(self, handle: Handle) -> None:
        """Rank 0: the pointer for those who come later, then the removal of old versions."""
        if self._ranks.rank == 0:
            self._store.replace(LATEST_FILE, json.dumps(handle).encode())
            self._history.remove_old(self._keep)


def latest(url: str, storage_options: dict[str, Any] | None = None, timeout_s: float = 120) -> Handle | None:
    """The handle of the newest version at ``url``, for a receiver that joins later; None if there is no version."""
    try:
        return json.loads(open_store(url, storage_options, timeout_s).read(LATEST_FILE))
    except StaleHandleError:
        return None
    except ValueError as error:
        raise WeightSyncError(f"{url}/{LATEST_FILE} is damaged: {error}") from error
