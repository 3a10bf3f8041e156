"""The engine's end of weights through storage: maps or fetches a version, replays deltas, verifies the final bytes."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch

from weight_sync.disk import delta
from weight_sync.disk.storage import REQUEST_BYTES, LocalStore, Store, open_store
from weight_sync.disk.versions import FileRecord, Link, Record, read_record
from weight_sync.errors import VerificationError, WeightSyncError, require_positive
from weight_sync.hashing import default_threads, in_threads, xxh3_128
from weight_sync.manifest import Manifest, TensorEntry
from weight_sync.receiver import require_hashes, require_transport
from weight_sync.transport import Handle, Received, Receiver

Bytes = dict[str, torch.Tensor]
"""Every tensor's bytes [bytes] uint8, by name."""


class Buffers:
    """Memory for tensors' bytes, used again once no tensor over it is left: the first touch of memory is slow."""

    def __init__(self):
        self._buffers: dict[str, list[tuple[numpy.ndarray, weakref.ref]]] = {}

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)  # numpy's strides of nothing cannot be viewed as another dtype
        kept = [(array, used) for array, used in self._buffers.get(name, []) if array.nbytes == nbytes]
        free = [array for array, used in kept if used() is None]
        array = free[0] if free else numpy.empty(nbytes, dtype=numpy.uint8)
        view = array[:]  # all tensors over the memory hold this object, and nobody else does
        self._buffers[name] = [entry for entry in kept if entry[0] is not array] + [(array, weakref.ref(view))]
        return torch.from_numpy(view)


@dataclass
class _Base:
    """The version this receiver builds deltas on."""

    link: Link
    tensors: Bytes


class DiskReceiver(Receiver):
    """Tensors of ``receive`` are never changed by a later one, so ``check`` of what it returns has nothing to find.

    Without ``keep_base`` full versions at a local path are mapped, without a copy; they stay readable when the version
    is removed. All else is in private memory, which is used again when no tensor over it is left: with deltas that is
    the policy twice, and once more for every earlier version of which tensors are still held. Writing to a tensor
    changes this process' copy only; if it was the base of the next delta, that shows in the hashes, and the full version
    is read again.

    keep_base        keep the last version in memory to apply deltas to; without it every delta starts from the full
                     version in storage
    verify           compare every tensor's xxh3-128 with the manifest before handing it out. Without it, damage to the
                     base or a delta goes unnoticed
    storage_options  for fsspec, over those in the handle
    timeout_s        for each request to a remote store
    threads          for reading, unpacking and hashing; default: the cores, at most 8
    """

    def __init__(
        self,
        keep_base: bool = False,
        verify: bool = True,
        storage_options: dict[str, Any] | None = None,
        timeout_s: float = 120,
        threads: int | None = None,
    ):
        require_positive(timeout_s=timeout_s, threads=threads)
        self._keep_base = keep_base
        self._verify = verify
        self._storage_options = storage_options or {}
        self._timeout_s = timeout_s
        self._threads = threads or default_threads()
        self._buffers = Buffers()
        self._base: _Base | None = None
        self._stats: dict[str, float] = {}

    def receive(self, handle: Handle) -> Received:
        """Raises VerificationError when neither the own base nor the full version in storage leads to the bytes that
        were sent; the next full version heals that."""
        start = time.perf_counter()
        require_transport(handle, "disk", "url", "directory", "record_xxh3_128")
        self._stats = {"read_s": 0.0, "apply_s": 0.0, "hash_s": 0.0, "wire_bytes": 0, "from_base": 0}
        store = open_store(handle["url"], handle.get("storage_options", {}) | self._storage_options, self._timeout_s)
        link = Link(handle["directory"], handle["record_xxh3_128"])
        record = read_record(store, link)
        tensors = self._from_base(store, link, record)
        if tensors is None:
            tensors = self._from_storage(store, link, record)
        if self._keep_base:
            self._base = _Base(link, tensors)
        manifest = record.manifest
        typed = {e.name: tensors[e.name].view(e.torch_dtype).view(e.shape) for e in manifest.tensors}
        stats = self._stats | {"receive_s": time.perf_counter() - start, "total_bytes": manifest.total_bytes}
        return Received(manifest.version, manifest, typed, lambda: None, stats)

    def close(self) -> None:
        self._base = None
        self._buffers = Buffers()

    def _from_base(self, store: Store, link: Link, record: Record) -> Bytes | None:
        """The version by way of the one that is kept; None if that is no way to it, or is not what it should be."""
        base, self._base = self._base, None
        links = [*record.chain, link]
        if base is None or base.link not in links:
            return None
        try:
            tensors = self._replay(store, base.tensors, links[links.index(base.link) + 1 :], record)
        except WeightSyncError:
            return None
        self._stats["from_base"] = 1
        return tensors

    def _from_storage(self, store: Store, link: Link, record: Record) -> Bytes:
        links = [*record.chain, link]
        full = record if not record.is_delta else read_record(store, links[0])
        return self._replay(store, self._read_full(store, links[0].directory, full), links[1:], record)

    def _replay(self, store: Store, base: Bytes, links: Sequence[Link], record: Record) -> Bytes:
        """Apply the deltas ``links`` one after another; the last is ``record``, whose hashes the result must have."""
        entries = record.manifest.tensors
        tensors = dict(base)
        if any(e.name not in base or len(base[e.name]) != e.nbytes for e in entries):
            raise WeightSyncError(f"version {record.manifest.version} has other tensors than what it builds on")
        for link in links:
            step = record if link is links[-1] else read_record(store, link)
            lengths = {name: nbytes for file in step.files.values() for name, (_, nbytes) in file.tensors.items()}
            packed = {name: torch.empty(nbytes, dtype=torch.uint8) for name, nbytes in lengths.items()}
            self._read(store, link.directory, step, packed)
            start = time.perf_counter()
            jobs = []
            for entry in entries:
                if entry.name in packed:
                    before = tensors[entry.name]
                    if before is base[entry.name]:  # it may not be written to; what this replay made may
                        tensors[entry.name] = self._buffers.take(entry.name, entry.nbytes)
                    jobs += self._chunks(record, entry, packed[entry.name], before, tensors[entry.name])
            in_threads(lambda job: job(), jobs, self._threads)
            self._stats["apply_s"] += time.perf_counter() - start
        self._check_hashes(record.manifest, tensors)
        return tensors

    def _chunks(
        self, record: Record, entry: TensorEntry, packed: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> list[Callable[[], None]]:
        """The work of applying a tensor's delta, in parts; damage names the tensor."""

        def apply(frame: torch.Tensor, part: slice) -> None:
            with _named(record, entry):
                delta.apply_chunk(frame, before[part], after[part], entry.torch_dtype.itemsize)

        with _named(record, entry):
            frames = delta.split(packed, entry.nbytes)
        parts = delta.chunks(entry.nbytes)
        return [partial(apply, frame, part) for frame, part in zip(frames, parts, strict=True)]

    def _read_full(self, store: Store, directory: str, record: Record) -> Bytes:
        if self._verify:
            for name, file in record.files.items():
                header = torch.empty(file.header_bytes, dtype=torch.uint8)
                store.read_into([header], 0, directory, name)
                if xxh3_128(header) != file.header_xxh3_128:
                    raise VerificationError(record.manifest.version, list(file.tensors))
        if isinstance(store, LocalStore) and not self._keep_base:
            return self._map(store, directory, record)
        tensors = {e.name: self._buffers.take(e.name, e.nbytes) for e in record.manifest.tensors}
        self._read(store, directory, record, tensors)
        return tensors

    def _map(self, store: LocalStore, directory: str, record: Record) -> Bytes:
        tensors = {}
        for name, file in record.files.items():
            data = store.map(directory, name)
            cut_short = [name for name, (offset, nbytes) in file.tensors.items() if offset + nbytes > len(data)]
            if cut_short:
                raise VerificationError(record.manifest.version, cut_short)
            tensors |= {name: data[offset : offset + nbytes] for name, (offset, nbytes) in file.tensors.items()}
            self._stats["wire_bytes"] += sum(nbytes for _, nbytes in file.tensors.values())
        return tensors

    def _read(self, store: Store, directory: str, record: Record, targets: Bytes) -> None:
        """Fill the ``targets`` from a version's files."""
        start = time.perf_counter()

        def read(request: tuple[str, int, list[tuple[str, torch.Tensor]]]) -> None:
            file, offset, pieces = request
            count = store.read_into([piece for _, piece in pieces], offset, directory, file)
            ends = itertools.accumulate(len(piece) for _, piece in pieces)
            missing = [name for (name, _), end in zip(pieces, ends, strict=True) if end > count]
            if missing:
                raise VerificationError(record.manifest.version, missing)

        requests = [(name, *part) for name, file in record.files.items() for part in _requests(file, targets)]
        in_threads(read, requests, self._threads)
        self._stats["read_s"] += time.perf_counter() - start
        self._stats["wire_bytes"] += sum(len(target) for target in targets.values())

    def _check_hashes(self, manifest: Manifest, tensors: Bytes) -> None:
        if not self._verify:
            return
        require_hashes(manifest.tensors)
        start = time.perf_counter()
        entries = sorted(manifest.tensors, key=lambda entry: -entry.nbytes)
        found = in_threads(lambda entry: xxh3_128(tensors[entry.name]), entries, self._threads)
        self._stats["hash_s"] += time.perf_counter() - start
        wrong = [entry.name for entry, value in zip(entries, found, strict=True) if value != entry.xxh3_128]
        if wrong:
            raise VerificationError(manifest.version, wrong)


@contextmanager
def _named(record: Record, entry: TensorEntry):
    """A delta that is damaged, as an error that names its tensor."""
    try:
        yield
    except WeightSyncError as error:
        raise VerificationError(record.manifest.version, [entry.name]) from error


def _requests(file: FileRecord, targets: Bytes) -> list[tuple[int, list[tuple[str, torch.Tensor]]]]:
    """Offset and (name, piece of the target) of reads of at most ``REQUEST_BYTES``: neighbours together, the large
    in parts."""
    requests: list[tuple[int, list[tuple[str, torch.Tensor]]]] = []
    end = room = 0
    for name, (offset, nbytes) in sorted(file.tensors.items(), key=lambda item: item[1]):
        for piece in targets[name].split(REQUEST_BYTES) if nbytes else ():
            if not requests or offset != end or len(piece) > room:
                requests.append((offset, []))
                room = REQUEST_BYTES
            requests[-1][1].append((name, piece))
            room -= len(piece)
            offset = end = offset + len(piece)
    return requests
