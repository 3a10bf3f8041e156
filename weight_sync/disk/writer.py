"""One rank's files of one version: hashed, compressed and written in the background while the next tensors are made."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weight_sync.disk import delta
from weight_sync.disk.checkpoint_files import FilePlan, safetensors_header
from weight_sync.disk.storage import Store, Writer
from weight_sync.disk.versions import FileRecord
from weight_sync.hashing import xxh3_128
from weight_sync.manifest import TensorEntry


@dataclass
class Written:
    """What a rank wrote: hashes by tensor, records by file."""

    hashes: dict[str, str]
    files: dict[str, FileRecord]


class VersionWriter:
    """Takes buckets of tensors in the order of the files.

    files      the safetensors files of a full version, or the single file of a delta
    previous   bytes of the version before, by name, brought up to date on the way; None: no delta will follow
    is_delta   write what differs from ``previous`` instead of the tensors
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        files: Sequence[FilePlan],
        previous: dict[str, torch.Tensor] | None,
        is_delta: bool,
        hashes: bool,
        level: int,
        threads: int,
    ):
        self._store, self._directory = store, directory
        self._previous, self._is_delta, self._hashes, self._level = previous, is_delta, hashes, level
        self._file_of = {entry.name: file for file in files for entry in file.entries}
        self._pool = ThreadPoolExecutor(threads)
        self._background = ThreadPoolExecutor(1)
        self._unfinished: list[Future] = []
        self._file: FilePlan | None = None
        self._writer: Writer | None = None
        self._position = 0
        self._done = Written({}, {})
        self.seconds = {"hash_s": 0.0, "encode_s": 0.0, "store_s": 0.0}
        """Of this rank's background work: for deltas, writing, and waiting for hashes that were not made meanwhile."""

    def submit(self, entries: Sequence[TensorEntry], tensors: dict[str, torch.Tensor]) -> None:
        """Write ``tensors`` [bytes] uint8, which must not change until this bucket is finished."""
        self._unfinished.append(self._background.submit(self._store_bucket, entries, tensors))

    def wait(self, unfinished: int = 0) -> None:
        """Until at most ``unfinished`` buckets are not yet written. Raises what went wrong with the others."""
        while len(self._unfinished) > unfinished:
            self._unfinished.pop(0).result()

    def finish(self) -> Written:
        """All that was submitted is in the store."""
        self.wait()
        self._close_file()
        self._shut_down()
        return self._done

    def abandon(self) -> None:
        """Stop and let go of unfinished files."""
        self._shut_down()
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _shut_down(self) -> None:
        self._background.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def _store_bucket(self, entries: Sequence[TensorEntry], tensors: dict[str, torch.Tensor]) -> None:
        start = time.perf_counter()
        hashes = self._pool.map(lambda entry: xxh3_128(tensors[entry.name]), entries if self._hashes else ())
        if self._is_delta:
            packed = self._encode(entries, tensors)
        else:
            packed = [tensors[entry.name].numpy().data for entry in entries]
            if self._previous is not None:
                list(self._pool.map(lambda entry: self._remember(entry, tensors[entry.name]), entries))
        encoded = time.perf_counter()
        for entry, data in zip(entries, packed, strict=True):
            if data is not None:
                self._append(entry, data)
        stored = time.perf_counter()
        self._done.hashes.update(zip((entry.name for entry in entries), hashes, strict=False))
        self.seconds["encode_s"] += encoded - start
        self.seconds["store_s"] += stored - encoded
        self.seconds["hash_s"] += time.perf_counter() - stored

    def _encode(self, entries: Sequence[TensorEntry], tensors: dict[str, torch.Tensor]) -> list[bytes | None]:
        """The delta of every tensor, whose previous bytes are brought up to date chunk by chunk."""

        def encode(job: tuple[TensorEntry, slice]) -> bytes:
            entry, part = job
            previous, new = self._previous[entry.name][part], tensors[entry.name][part]
            frame = delta.encode_chunk(previous, new, entry.torch_dtype.itemsize, self._level)
            if frame:
                previous.copy_(new)
            return frame

        counts = [len(list(delta.chunks(entry.nbytes))) for entry in entries]
        frames = self._pool.map(encode, [(entry, part) for entry in entries for part in delta.chunks(entry.nbytes)])
        return [delta.join(list(itertools.islice(frames, count))) for count in counts]

    def _remember(self, entry: TensorEntry, new: torch.Tensor) -> None:
        if entry.name not in self._previous:
            self._previous[entry.name] = torch.empty_like(new)
        self._previous[entry.name].copy_(new)

    def _append(self, entry: TensorEntry, data: bytes | memoryview) -> None:
        file = self._file_of[entry.name]
        if file is not self._file:
            self._close_file()
            self._open_file(file)
        self._writer.write(data)
        self._done.files[file.name].tensors[entry.name] = (self._position, len(data))
        self._position += len(data)

    def _open_file(self, file: FilePlan) -> None:
        self._file, self._position = file, 0
        self._writer = self._store.create(self._directory, file.name)
        if self._is_delta:
            self._done.files[file.name] = FileRecord({})
        else:
            header = safetensors_header(file.entries)
            self._writer.write(header)
            self._done.files[file.name] = FileRecord({}, len(header), xxh3_128(header))
            self._position = len(header)

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
