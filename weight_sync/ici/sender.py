"""The trainer's end of ici: a snapshot of every rank's regions, offered to whoever asks."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from weight_sync.errors import WeightSyncError, require_positive
from weight_sync.hashing import default_threads, in_threads, xxh3_128
from weight_sync.ici.buckets import FlatRegions
from weight_sync.ici.links import Group, Store, backend_for, one_line
from weight_sync.ici.publication import Publication, publication_key, whole_regions
from weight_sync.ici.serving import LinkServer
from weight_sync.ici.sharded_hashes import ShardedHashes
from weight_sync.manifest import Manifest
from weight_sync.sender import Layout, Ranks, Region, agree, make_layout, stats_of
from weight_sync.shard import Shard
from weight_sync.transport import Handle, Sender

SLOTS = 2


class IciSender(Sender):
    """One rank of a sender.

    backend        torch.distributed backend that moves the bytes, or one per kind of device (``cpu:gloo,...``); receivers
                   learn it from the sender
    device         where the snapshots lie, a device that the backend moves tensors of
    host           name or address under which receivers reach sender rank 0 (default: what this
                   host's name resolves to)
    bucket_bytes   most bytes of one message; every rank keeps a few of this size
    bucket_tensors most tensors of one message (default: as many as fit)
    hashes         whether to hash every tensor, which a verifying receiver needs. A tensor that several ranks hold parts
                   of travels to one of them for it, and needs memory there
    timeout_s      deadline of every wait for another rank
    threads        for copies and hashes; default: this rank's share of the cores, at most 8
    """

    def __init__(
        self,
        run_id: str,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        backend: str = "gloo",
        device: str = "cpu",
        host: str | None = None,
        bucket_bytes: int = 64 << 20,
        bucket_tensors: int | None = None,
        hashes: bool = True,
        timeout_s: float = 120.0,
        threads: int | None = None,
    ):
        require_positive(bucket_bytes=bucket_bytes, bucket_tensors=bucket_tensors, timeout_s=timeout_s, threads=threads)
        self.manifest: Manifest | None = None
        self.stats: dict[str, float] = {}
        self._run_id = run_id
        self._ranks = Ranks(rank, world_size, group)
        self._device, self._host = torch.device(device), host
        self._backend = backend_for(backend, self._device)
        self._bucket_bytes, self._bucket_tensors = bucket_bytes, bucket_tensors
        self._hashes, self._timeout_s = hashes, timeout_s
        self._threads = threads or default_threads(world_size)
        self._store: Store | None = None
        self._server: LinkServer | None = None
        self._group: Group | None = None
        self._digests: list[str] = []  # by rank: of the regions the layout was made from
        self._layout: Layout | None = None
        self._slots: list[FlatRegions] = []
        self._hasher: ShardedHashes | None = None
        self._sequence = 0

    def publish(self, version: int, shards: Iterable[Shard], whole: bool = False) -> Handle:
        start = time.perf_counter()
        self._connect()
        self._sequence += 1
        mine = self._agree(version, shards)
        agreed = time.perf_counter()

        flat = self._slots[self._sequence % SLOTS]
        self._ranks.exchange(lambda: self._copy(flat, mine))
        copied = time.perf_counter()

        manifest = dataclasses.replace(self._layout.manifest, version=version)
        if self._hashes:
            manifest = self._hash(manifest, flat)
        digest = self._ranks.exchange(lambda: self._offer(manifest, flat))[0]

        self.manifest = manifest
        self.stats = stats_of(manifest, start, agreed, copied, time.perf_counter())
        return {
            "transport": "ici",
            "version": version,
            "store": list(self._store.address),
            "sequence": self._sequence,
            "publication_xxh3_128": digest,
        }

    def close(self) -> None:
        """Links that are being served end at once or at their deadline. With rank 0's end the store is gone."""
        if self._server is not None:
            self._server.close()
        self._server = self._store = self._group = self._layout = self._hasher = None
        self._digests, self._slots = [], []

    def _connect(self) -> None:
        """Collective, the first time: rank 0's store, a group for the bytes between ranks, and the serving threads."""
        if self._store is not None:
            return
        rank, world_size = self._ranks.rank, self._ranks.world_size

        def serve() -> tuple[str, int] | None:
            if rank == 0:
                self._store = Store.serve(self._host or own_address(), self._timeout_s)
            return self._store and self._store.address

        address = self._ranks.exchange(serve)[0]

        def join() -> None:
            if rank != 0:
                self._store = Store.connect(address, self._timeout_s)
            if world_size > 1:
                name = f"{self._run_id}.publish"
                self._group = Group(self._store, name, rank, world_size, self._backend, self._timeout_s)
            self._server = LinkServer(rank, world_size, address, self._device, self._timeout_s)

        try:
            self._ranks.exchange(join)
        except WeightSyncError:
            self.close()
            raise

    def _agree(self, version: int, shards: Iterable[Shard]) -> dict[Region, Shard]:
        """Collective: this rank's shards by region, once the oldest snapshot is free for all ranks' shards."""
        oldest = self._sequence - SLOTS
        agreed = agree(self._ranks, version, shards, self._sequence, lambda: self._server.withdraw(oldest))
        self._ranks.exchange(lambda: self._server.forget(oldest, last_job=agreed.notes[0]))
        if self._ranks.rank == 0:
            self._store.delete(publication_key(oldest))
        if agreed.digests != self._digests or not self._slots:
            regions = self._ranks.exchange(lambda: agreed.regions)
            self._ranks.exchange(lambda: self._allocate(make_layout(regions)))
            self._digests = agreed.digests
        return agreed.shards

    def _allocate(self, layout: Layout) -> None:
        """Snapshots for this rank's share of the layout, in the manifest's order, which receivers' memory has too."""
        place = {entry.name: index for index, entry in enumerate(layout.manifest.tensors)}
        for regions in layout.writes:
            regions.sort(key=lambda region: (place[region.name], region.offsets))
        self._slots = [FlatRegions(layout.writes[self._ranks.rank]) for _ in range(SLOTS)]
        for flat in self._slots:
            flat.allocate(self._device)
        self._layout, self._hasher = layout, None
        if self._hashes:
            tensors = whole_regions(layout.manifest)
            rank, limits = self._ranks.rank, (self._bucket_bytes, self._bucket_tensors)
            self._hasher = ShardedHashes(layout.writes, tensors, rank, self._device, *limits)

    def _copy(self, flat: FlatRegions, shards: dict[Region, Shard]) -> None:
        def copy(region: Region) -> None:
            flat.view(region).copy_(shards[region].data.detach())

        regions = sorted(self._layout.writes[self._ranks.rank], key=lambda region: -region.nbytes)
        in_threads(copy, regions, self._threads)

    def _hash(self, manifest: Manifest, flat: FlatRegions) -> Manifest:
        """Collective: the manifest with the hash of every tensor."""

        def hash_share() -> dict[str, str]:
            try:
                return self._hasher.make(flat, self._group, self._threads)
            except RuntimeError as error:
                raise WeightSyncError(f"sender rank {self._ranks.rank} lost the others: {one_line(error)}") from error

        hashes: dict[str, str] = {}
        for part in self._ranks.exchange(hash_share):
            hashes |= part
        return manifest.with_hashes(hashes)

    def _offer(self, manifest: Manifest, flat: FlatRegions) -> str | None:
        """Let receivers have the version; on rank 0, the hash of what they find in the store about it."""
        publication = Publication(
            self._sequence,
            manifest,
            self._layout.writes,
            self._bucket_bytes,
            self._bucket_tensors,
            self._backend,
            self._device.type,
            flat,
        )
        digest = None
        if self._ranks.rank == 0:
            text = publication.to_bytes()
            digest = xxh3_128(text)
            self._store.put_bytes(publication_key(self._sequence), text)
        self._server.offer(publication)
        return digest


def own_address() -> str:
    """What this host's name resolves to, which is also where gloo listens; otherwise only this host can reach us."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
