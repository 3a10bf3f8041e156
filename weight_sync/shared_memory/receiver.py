"""An engine's end of shared memory: whole tensors, verified where they lie."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from weight_sync.errors import StaleHandleError, VerificationError, WeightSyncError, require_positive
from weight_sync.hashing import default_threads, xxh3_128
from weight_sync.manifest import Manifest
from weight_sync.portions import share_out
from weight_sync.receiver import require_transport, require_version, view_tensors, wrong_tensors
from weight_sync.shared_memory.segments import Segment
from weight_sync.transport import Handle, Received, Receiver


class SharedMemoryReceiver(Receiver):
    """Reads segments in place. Mappings are kept between versions and dropped when their sender has removed them.

    The tensors of ``receive`` are views; writing to one changes a private copy of the page, never what others see.

    verify   compare every tensor's xxh3-128 with the manifest before handing it out
    share    (index, count): verify only this part of the bytes. For the ranks of a tensor-parallel engine, which read
             the same pages: together they verify all, and must agree that none was refused before any of them loads
    threads  for hashing; default: the cores, at most 8
    """

    def __init__(self, verify: bool = True, share: tuple[int, int] = (0, 1), threads: int | None = None):
        require_positive(threads=threads)
        self._verify = verify
        self._share = share
        self._threads = threads or default_threads()
        self._segments: dict[Path, Segment] = {}

    def receive(self, handle: Handle) -> Received:
        start = time.perf_counter()
        fields = ("version", "host", "path", "sequence", "manifest_offset", "manifest_bytes", "manifest_xxh3_128")
        require_transport(handle, "shared_memory", *fields)
        segment = self._open(handle)
        version, sequence = handle["version"], handle["sequence"]

        def check() -> None:
            if not segment.holds(sequence):
                raise StaleHandleError(
                    f"version {version} is no longer in {segment.path}: publish {segment.state // 2} "
                    f"{'is overwriting' if segment.state % 2 else 'has overwritten'} publish {sequence}"
                )

        check()
        manifest = self._read_manifest(segment, handle, check)
        require_version(handle, manifest)
        if self._verify:
            self._check_hashes(segment, manifest, check)
        else:
            segment.forget_private_pages(self._threads)
        tensors = view_tensors(segment.data, manifest)
        stats = {"receive_s": time.perf_counter() - start, "total_bytes": manifest.total_bytes}
        return Received(version, manifest, tensors, check, stats)

    def close(self) -> None:
        self._segments.clear()

    def _open(self, handle: Handle) -> Segment:
        path = Path(handle["path"])
        if path in self._segments:
            self._segments[path].require_magic()
        else:
            self._segments = {known: segment for known, segment in self._segments.items() if known.exists()}
            try:
                self._segments[path] = Segment.open(path)
            except FileNotFoundError as error:
                raise StaleHandleError(
                    f"version {handle['version']}: {path} is not on host {os.uname().nodename}; it was written on host "
                    f"{handle['host']}, and may have been removed since"
                ) from error
            except OSError as error:
                raise WeightSyncError(f"version {handle['version']}: {path} cannot be opened: {error}") from error
        return self._segments[path]

    def _read_manifest(self, segment: Segment, handle: Handle, check: Callable[[], None]) -> Manifest:
        offset, nbytes = handle["manifest_offset"], handle["manifest_bytes"]
        text = segment.data[offset : offset + nbytes].numpy().tobytes()
        check()  # bytes that were overwritten meanwhile are stale, not damaged
        if len(text) != nbytes or xxh3_128(text) != handle["manifest_xxh3_128"]:
            raise WeightSyncError(f"version {handle['version']}: the manifest in {segment.path} is damaged")
        return Manifest.from_json(text)

    def _check_hashes(self, segment: Segment, manifest: Manifest, check: Callable[[], None]) -> None:
        index, count = self._share
        wrong = wrong_tensors(segment.data, share_out(manifest.tensors, [0] * count)[index], self._threads)
        if wrong:
            # Pages this process wrote to in place (a model's loader may) do not follow the sender: look past them.
            segment.forget_private_pages(self._threads)
            wrong = wrong_tensors(segment.data, wrong, self._threads)
        check()
        if wrong:
            raise VerificationError(manifest.version, [entry.name for entry in wrong])
