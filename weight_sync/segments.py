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

import torch

from weight_sync.errors import SpaceError, WeightSyncError

DIRECTORY = Path("/dev/shm")
HEADER_BYTES = PAGE_BYTES = mmap.PAGESIZE
MAGIC = 0x31_43_4E_59_53_5F_57  # "W_SYNC1"
MAP_NORESERVE = 0x4000  # absent from the mmap module
_MAGIC_WORD, _STATE_WORD = 0, 1


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
        self._words = whole[:HEADER_BYTES].view(torch.int64)
        self.data = whole[HEADER_BYTES:]

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Segment:
        """A new segment with ``nbytes`` of data, owned by this process, its memory reserved."""
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
                segment = cls(path, mmap.mmap(fd, 0))
            finally:
                os.close(fd)  # the mapping keeps a duplicate, and with it the lock
            segment._words[_MAGIC_WORD] = MAGIC
            return segment

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
            flags, protection = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            segment = cls(path, mmap.mmap(fd, 0, flags=flags, prot=protection))
        except ValueError as error:
            raise WeightSyncError(f"{path} is no weight segment: {error}") from error
        finally:
            os.close(fd)
        if segment._words[_MAGIC_WORD] != MAGIC:
            raise WeightSyncError(f"{path} is no weight segment")
        return segment

    @property
    def state(self) -> int:
        return int(self._words[_STATE_WORD])

    def begin_write(self, sequence: int) -> None:
        self._words[_STATE_WORD] = 2 * sequence + 1

    def end_write(self, sequence: int) -> None:
        self._words[_STATE_WORD] = 2 * sequence

    def holds(self, sequence: int) -> bool:
        return self.state == 2 * sequence

    def forget_private_pages(self) -> None:
        """See the sender's bytes again where this process wrote to a mapping from ``open``."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def require_space(slots: int, nbytes: int, directory: Path = DIRECTORY) -> None:
    """Raises SpaceError with the numbers unless ``slots`` segments of ``nbytes`` fit."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    memory = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    need = slots * (HEADER_BYTES + nbytes)
    if need > min(free, memory):
        size = f"{int(need / 2**30) + 1}g"
        raise SpaceError(
            f"{directory} has {free / 1e9:.2f} GB free and the machine {memory / 1e9:.2f} GB of memory, but {slots} "
            f"segment(s) of {nbytes / 1e9:.2f} GB need {need / 1e9:.2f} GB. Enlarge it (docker: --shm-size={size}; "
            f"Kubernetes: an emptyDir of medium Memory at {directory}, within the memory limit; host: mount -o "
            f"remount,size={size} {directory})" + (", or open the sender with slots=1" if slots > 1 else "")
        )


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
