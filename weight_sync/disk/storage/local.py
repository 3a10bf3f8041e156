"""Versions in a directory of this host, or of a file system that it has mounted."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from weight_sync.disk.storage.base import COMMIT_FILE, VERSION_DIRECTORY, Store, Writer
from weight_sync.errors import SpaceError, StaleHandleError, WeightSyncError
from weight_sync.receiver import map_private

_WRITING, _REMOVING = ".writing", ".removing"


class LocalStore(Store):
    def __init__(self, root: Path, fsync: bool):
        self.root = root
        self._fsync = fsync
        self._unlock: weakref.finalize | None = None

    def __str__(self) -> str:
        return str(self.root)

    def directories(self) -> list[str]:
        found = (path.parent.name for path in self.root.glob(f"*/{COMMIT_FILE}"))
        return [name for name in found if VERSION_DIRECTORY.fullmatch(name)]

    def claim(self) -> None:
        if self._unlock is not None:
            return
        with _errors(f"write to {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise WeightSyncError(f"another sender writes to {self.root}: give every run a place of its own") from None
        except OSError:
            pass  # a network file system without locks on directories: nobody notices a second sender
        self._unlock = weakref.finalize(self, os.close, lock)  # also when nobody has this object any more

    def release(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def remove_leftovers(self) -> None:
        hidden = [path for end in (_WRITING, _REMOVING) for path in self.root.glob(f".*{end}")]
        for path in hidden:
            if VERSION_DIRECTORY.fullmatch(path.name[1:].rpartition(".")[0]):
                with _errors(f"remove {path}"):
                    shutil.rmtree(path)

    def require_space(self, nbytes: int) -> None:
        with _errors(f"free space of {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.root).free
        if nbytes > free:
            raise SpaceError(
                f"{self.root} has {free / 1e9:.3f} GB free, the version needs {nbytes / 1e9:.3f} GB: make room, or keep "
                "fewer versions"
            )

    def begin(self, directory: str) -> None:
        with _errors(f"create a directory in {self.root}"):
            self._staging(directory).mkdir(parents=True)

    def require_begun(self, directory: str) -> None:
        if not self._staging(directory).is_dir():
            raise WeightSyncError(
                f"{self._staging(directory)} of rank 0 is not on {os.uname().nodename}: all ranks must see the same "
                "path; use a shared file system or an object store"
            )

    def create(self, directory: str, name: str) -> Writer:
        return _LocalWriter(self._staging(directory) / name, self._fsync)

    def commit(self, directory: str, record: bytes) -> None:
        self.put(directory, COMMIT_FILE, record)
        staging = self._staging(directory)
        with _errors(f"commit {self.root / directory}"):
            self._sync(staging)
            staging.rename(self.root / directory)
            self._sync(self.root)

    def discard(self, directory: str) -> None:
        shutil.rmtree(self._staging(directory), ignore_errors=True)

    def remove(self, directory: str) -> None:
        hidden = self.root / f".{directory}{_REMOVING}"
        with _errors(f"remove {self.root / directory}"):
            (self.root / directory).rename(hidden)
            shutil.rmtree(hidden)

    def replace(self, name: str, data: bytes) -> None:
        new = self.root / f".{name}.new"
        writer = _LocalWriter(new, self._fsync)
        try:
            writer.write(data)
        finally:
            writer.close()
        with _errors(f"replace {self.root / name}"):
            new.replace(self.root / name)
            self._sync(self.root)

    def read(self, *path: str) -> bytes:
        with _errors(f"read {self.root.joinpath(*path)}"):
            return self.root.joinpath(*path).read_bytes()

    def read_into(self, targets: Sequence[torch.Tensor], offset: int, *path: str) -> int:
        done = 0
        with _errors(f"read {self.root.joinpath(*path)}"), open(self.root.joinpath(*path), "rb", buffering=0) as file:
            file.seek(offset)
            for target in targets:
                view = memoryview(target.numpy())
                while view:
                    count = file.readinto(view)
                    if not count:
                        return done
                    view = view[count:]
                    done += count
        return done

    def map(self, *path: str) -> torch.Tensor:
        """A file's bytes [bytes] uint8 without a copy; they stay readable when the file is removed. Writing to them
        changes a private copy of the page."""
        with _errors(f"map {self.root.joinpath(*path)}"):
            fd = os.open(self.root.joinpath(*path), os.O_RDONLY)
            try:
                if os.fstat(fd).st_size == 0:
                    return torch.empty(0, dtype=torch.uint8)
                return torch.frombuffer(map_private(fd), dtype=torch.uint8)
            finally:
                os.close(fd)

    def _staging(self, directory: str) -> Path:
        return self.root / f".{directory}{_WRITING}"

    def _sync(self, directory: Path) -> None:
        if self._fsync:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class _LocalWriter(Writer):
    def __init__(self, path: Path, fsync: bool):
        self._path, self._fsync = path, fsync
        with _errors(f"create {path}"):
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        with _errors(f"write {self._path}", len(view)):
            while view:
                view = view[self._file.write(view) :]

    def close(self) -> None:
        with _errors(f"flush {self._path}"), self._file:
            if self._fsync:
                os.fsync(self._file.fileno())

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()


@contextmanager
def _errors(doing: str, nbytes: int = 0):
    """Errors of the operating system as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise StaleHandleError(f"cannot {doing}: it was removed, or is not on this host") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"cannot {doing}: no space left for {nbytes / 1e9:.3f} GB more") from error
        raise WeightSyncError(f"cannot {doing}: {error}") from error
