"""Version directories on a local path or any fsspec URL: each appears whole or not at all.

A local directory is written under a temporary name, flushed to the disk and renamed. Object stores cannot rename, so
there the commit file is written last, and a directory without one does not exist for readers. Nothing is ever written
into a directory that was committed.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from weight_sync.errors import SpaceError, StaleHandleError, WeightSyncError

COMMIT_FILE = "weight_sync.json"
REQUEST_BYTES = 64 * 2**20
"""The most that one request to an object store carries; its deadline is for that much."""
MAP_NORESERVE = 0x4000  # absent from the mmap module
Result = TypeVar("Result")


def open_store(url: str, storage_options: dict[str, Any] | None = None, timeout_s: float = 120, fsync: bool = True):
    """The place behind a path or URL.

    storage_options  for the fsspec file system (endpoint, credentials, ...)
    timeout_s        for each request to a remote store
    fsync            whether local files are on the disk, not only in the page cache, before a version appears
    """
    try:
        filesystem, path = url_to_fs(url, **(storage_options or {}))
    except (ImportError, ValueError, TypeError) as error:
        raise WeightSyncError(f"{url} cannot be opened: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStore(Path(path), fsync)
    return ObjectStore(filesystem, path.rstrip("/"), url, timeout_s)


class Writer(ABC):
    """A file that is written from front to back."""

    @abstractmethod
    def write(self, data: memoryview | bytes) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """The file is complete."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of a file that will not be complete. Never raises."""


class Store(ABC):
    """A place for version directories and one small pointer file."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Committed directories."""

    @abstractmethod
    def remove_leftovers(self) -> list[str]:
        """Remove what interrupted writes left behind; returns the names."""

    @abstractmethod
    def require_space(self, nbytes: int) -> None:
        """Raises SpaceError with the numbers if ``nbytes`` more do not fit, where that is known."""

    @abstractmethod
    def begin(self, directory: str) -> None:
        """Make a place for a new directory that nobody sees yet."""

    @abstractmethod
    def require_begun(self, directory: str) -> None:
        """Raises WeightSyncError if another rank's ``begin`` cannot be seen from here."""

    @abstractmethod
    def create(self, directory: str, name: str) -> Writer:
        """A new file in a directory that was begun and not committed."""

    @abstractmethod
    def commit(self, directory: str, record: bytes) -> None:
        """Make the directory visible, with ``record`` as its commit file. All writers are closed."""

    @abstractmethod
    def discard(self, directory: str) -> None:
        """Remove a directory that was begun and will not be committed. Never raises."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Remove a committed directory; it is gone for readers before its first file is."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file beside the directories; readers see the old bytes or the new ones."""

    @abstractmethod
    def read(self, *path: str) -> bytes:
        """A small file, whole. Raises StaleHandleError if it is not there."""

    @abstractmethod
    def read_into(self, targets: Sequence[torch.Tensor], offset: int, *path: str) -> int:
        """Fill ``targets`` [bytes] uint8 one after another from byte ``offset`` of a file; at most ``REQUEST_BYTES``
        together. Returns the bytes read, fewer at the file's end. Raises StaleHandleError if it is not there."""

    def put(self, directory: str, name: str, data: bytes) -> int:
        """A whole file of a directory that was begun; returns its size."""
        writer = self.create(directory, name)
        try:
            writer.write(data)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        return len(data)


# --- local paths ---


class LocalStore(Store):
    def __init__(self, root: Path, fsync: bool):
        self.root = root
        self._fsync = fsync

    def __str__(self) -> str:
        return str(self.root)

    def directories(self) -> list[str]:
        return [path.parent.name for path in self.root.glob(f"[!.]*/{COMMIT_FILE}")]

    def remove_leftovers(self) -> list[str]:
        leftovers = [*self.root.glob(".*.writing"), *self.root.glob(".*.removing"), *self.root.glob(".*.new")]
        for path in leftovers:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return [path.name for path in leftovers]

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
        hidden = self.root / f".{directory}.removing"
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
                private = {"flags": mmap.MAP_PRIVATE | MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
                return torch.frombuffer(mmap.mmap(fd, 0, **private), dtype=torch.uint8)
            finally:
                os.close(fd)

    def _staging(self, directory: str) -> Path:
        return self.root / f".{directory}.writing"

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


# --- object stores ---


class ObjectStore(Store):
    """Any fsspec file system that is not the local one. Every request runs in a thread of its own that is left behind
    when it misses its deadline, because not every file system knows deadlines."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str, timeout_s: float):
        self._filesystem, self._root, self._url, self._timeout_s = filesystem, root, url, timeout_s

    def __str__(self) -> str:
        return self._url

    def directories(self) -> list[str]:
        return [name for name in self._subdirectories() if self._exists(name, COMMIT_FILE)]

    def remove_leftovers(self) -> list[str]:
        leftovers = [name for name in self._subdirectories() if not self._exists(name, COMMIT_FILE)]
        for name in leftovers:
            self._request("remove", self._filesystem.rm, self._path(name), recursive=True)
        return leftovers

    def require_space(self, nbytes: int) -> None:
        """What an object store has left is not known."""

    def begin(self, directory: str) -> None:
        """Directories of an object store are where their files are."""

    def require_begun(self, directory: str) -> None:
        """Every rank sees the same store."""

    def create(self, directory: str, name: str) -> Writer:
        return _ObjectWriter(self, self._path(directory, name))

    def commit(self, directory: str, record: bytes) -> None:
        self._request("write", self._filesystem.pipe_file, self._path(directory, COMMIT_FILE), record)

    def discard(self, directory: str) -> None:
        with suppress(WeightSyncError):
            self._request("remove", self._filesystem.rm, self._path(directory), recursive=True)

    def remove(self, directory: str) -> None:
        self._request("remove", self._filesystem.rm_file, self._path(directory, COMMIT_FILE))
        self._request("remove", self._filesystem.rm, self._path(directory), recursive=True)

    def replace(self, name: str, data: bytes) -> None:
        self._request("write", self._filesystem.pipe_file, self._path(name), data)

    def read(self, *path: str) -> bytes:
        return self._request("read", self._filesystem.cat_file, self._path(*path))

    def read_into(self, targets: Sequence[torch.Tensor], offset: int, *path: str) -> int:
        end = offset + sum(map(len, targets))
        data = memoryview(self._request("read", self._filesystem.cat_file, self._path(*path), offset, end))
        done = 0
        for target in targets:
            piece = data[done : done + len(target)]
            memoryview(target.numpy())[: len(piece)] = piece
            done += len(piece)
        return done

    def _path(self, *path: str) -> str:
        return "/".join((self._root, *path))

    def _exists(self, *path: str) -> bool:
        return self._request("look for", self._filesystem.exists, self._path(*path))

    def _subdirectories(self) -> list[str]:
        self._filesystem.invalidate_cache()  # other processes write here
        try:
            listed = self._request("list", self._filesystem.ls, self._root, detail=True)
        except StaleHandleError:
            return []
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in listed if entry["type"] == "directory"]

    def _request(self, doing: str, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        result: list[Result] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work(*args, **kwargs))
            except BaseException as error:
                failure.append(error)

        what = f"cannot {doing} {args[0] if args else ''} at {self._url}"
        thread = threading.Thread(target=run, daemon=True, name=f"weight_sync {doing}")
        thread.start()
        thread.join(self._timeout_s)
        if result:
            return result[0]
        if not failure:
            raise WeightSyncError(f"{what}: no answer within {self._timeout_s:g} s")
        if isinstance(failure[0], FileNotFoundError):
            raise StaleHandleError(f"{what}: it is not there (any more)") from failure[0]
        raise WeightSyncError(f"{what}: {type(failure[0]).__name__}: {failure[0]}") from failure[0]


class _ObjectWriter(Writer):
    def __init__(self, store: ObjectStore, path: str):
        self._store, self._path = store, path
        self._file = store._request("create", store._filesystem.open, path, "wb", block_size=REQUEST_BYTES)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), REQUEST_BYTES):
            piece = view[start : start + REQUEST_BYTES]
            self._store._request("write", lambda _, piece=piece: self._file.write(piece), self._path)

    def close(self) -> None:
        self._store._request("write", lambda _: self._file.close(), self._path)

    def abandon(self) -> None:
        with suppress(Exception):
            self._store._request("discard", lambda _: self._file.discard(), self._path)
