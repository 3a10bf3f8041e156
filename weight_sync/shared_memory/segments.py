"""Files of shared memory that hold one policy version each: their names, their states, and the removal of old ones.

A segment is a page of header, the data and, on a page of its own, the manifest. The second word of the header is its
state: 2n once the n-th publish has finished writing it, 2n+1 while the n-th publish writes it. A reader that finds the
same even state before and after reading has read one version. Every owner holds a shared flock on the file, which the
kernel drops when the owner dies, however it dies: that tells a segment in use from one left behind, in any process
namespace.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weight_sync.errors import SpaceError, WeightSyncError
from weight_sync.hashing import in_threads
from weight_sync.receiver import map_private

DIRECTORY = Path("/dev/shm")
HEADER_BYTES = PAGE_BYTES = mmap.PAGESIZE
MAGIC = 0x31_43_4E_59_53_5F_57  # "W_SYNC1"
_MAGIC_WORD, _STATE_WORD = 0, 1
_SHARED, _SWAPPED = np.uint64(1 << 61), np.uint64(1 << 62)
"""Bits of a word of the page map; the highest, above them, says that the page is present."""


def require_run_id(run_id: str) -> None:
    if not re.fullmatch(r"[\w.-]{1,128}", run_id, re.ASCII):
        raise WeightSyncError(f"run id {run_id!r} cannot be part of a file name: use up to 128 letters, digits, . _ -")


@dataclass(frozen=True)
class SegmentName:
    """``weight_sync.<run id>.<owner's pid>.<token>.<slot>``; the token makes every name unique for good."""

    run_id: str
    pid: int
    token: str
    slot: int

    _PATTERN = re.compile(r"weight_sync\.(?P<run_id>[\w.-]+)\.(?P<pid>\d+)\.(?P<token>[0-9a-f]{8})\.(?P<slot>\d+)")

    @classmethod
    def new(cls, run_id: str, slots: int) -> list[SegmentName]:
        token = secrets.token_hex(4)
        return [cls(run_id, os.getpid(), token, slot) for slot in range(slots)]

    @classmethod
    def parse(cls, text: str) -> SegmentName | None:
        match = cls._PATTERN.fullmatch(text)
        return match and cls(match["run_id"], int(match["pid"]), match["token"], int(match["slot"]))

    def __str__(self) -> str:
        return f"weight_sync.{self.run_id}.{self.pid}.{self.token}.{self.slot}"


class Segment:
    """A mapped segment. It is unmapped when the last tensor over it is gone.

    data   [bytes] uint8, everything after the header
    """

    def __init__(self, path: Path, mapping: mmap.mmap):
        self.path = path
        self._mapping = mapping
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address = whole.data_ptr()
        self._words = whole[:HEADER_BYTES].view(torch.int64)
        self.data = whole[HEADER_BYTES:]

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Segment:
        """A new segment with ``nbytes`` of data, owned by this process, its memory reserved; none until a write began."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if os.fstat(fd).st_nlink == 0:
                    continue  # taken for a stale one and removed in the moment before it was locked
                try:
                    os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)  # fails now rather than by SIGBUS in a later write
                except OSError as error:
                    path.unlink()
                    raise SpaceError(f"{path.parent} could not give {nbytes / 1e9:.2f} GB: {error.strerror}") from error
                return cls(path, mmap.mmap(fd, 0))
            finally:
                os.close(fd)  # the mapping keeps a duplicate, and with it the lock

    @classmethod
    def share(cls, path: Path) -> Segment:
        """Another rank's segment, to write to and own together."""
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"{path} of rank 0 is not on {os.uname().nodename}: all ranks must share a host"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return cls(path, mmap.mmap(fd, 0))
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path) -> Segment:
        """A sender's segment, to read. Writing to a tensor over it changes a private copy of the page."""
        fd = os.open(path, os.O_RDONLY)
        try:
            segment = cls(path, map_private(fd))
        except ValueError as error:
            raise WeightSyncError(f"{path} is no weight segment: {error}") from error
        finally:
            os.close(fd)
        segment.require_magic()
        return segment

    def require_magic(self) -> None:
        if self._words[_MAGIC_WORD] != MAGIC:
            raise WeightSyncError(f"{self.path} is no weight segment, or its header is damaged")

    @property
    def state(self) -> int:
        return int(self._words[_STATE_WORD])

    def begin_write(self, sequence: int) -> None:
        self._words[_STATE_WORD] = 2 * sequence + 1
        self._words[_MAGIC_WORD] = MAGIC

    def end_write(self, sequence: int) -> None:
        self._words[_STATE_WORD] = 2 * sequence

    def holds(self, sequence: int) -> bool:
        return self.state == 2 * sequence

    def forget_private_pages(self, threads: int) -> None:
        """See the sender's bytes again where this process wrote to a mapping from ``open``.

        Dropping pages without need would be dear: the next read of each takes a page fault.
        """
        pages = -(-len(self._mapping) // PAGE_BYTES)
        part = -(-pages // threads)
        if any(
            in_threads(lambda start: self._is_private(start, min(part, pages - start)), range(0, pages, part), threads)
        ):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def _is_private(self, start: int, count: int) -> bool:
        """Whether one of ``count`` pages is this process' own. Asks the kernel's page map, which has a word a page whose
        upper bits say present, swapped, and of the shared file."""
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek((self._address // PAGE_BYTES + start) * 8)
                words = np.frombuffer(pagemap.read(count * 8), dtype=np.uint64)
        except OSError:
            words = []
        if len(words) < count:
            return True  # a sandbox without a page map: nobody knows
        mapped = words >= _SWAPPED
        return bool((mapped & (words & _SHARED == 0)).any())

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def _segments(directory: Path) -> list[tuple[Path, SegmentName]]:
    found = ((path, SegmentName.parse(path.name)) for path in directory.glob("weight_sync.*"))
    return [(path, name) for path, name in found if name is not None]


def remove_segments(run_id: str, directory: Path = DIRECTORY) -> list[Path]:
    """Remove all segments of a run, in use or not; who has them mapped can go on reading. Returns what was removed."""
    paths = [path for path, name in _segments(directory) if name.run_id == run_id]
    for path in paths:
        path.unlink(missing_ok=True)
    return paths


def remove_stale_segments(directory: Path = DIRECTORY) -> list[Path]:
    """Remove the segments, of any run, that no living process owns. Returns what was removed."""
    removed = []
    for path, _ in _segments(directory):
        try:
            fd = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed
