"""Versions in an object store, or any other file system that fsspec knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import fsspec
import torch

from weight_sync.deadlines import within
from weight_sync.disk.storage.base import COMMIT_FILE, REQUEST_BYTES, VERSION_DIRECTORY, Store, Writer
from weight_sync.errors import StaleHandleError, WeightSyncError

Result = TypeVar("Result")


class ObjectStore(Store):
    """Any fsspec file system that is not the local one. Every request runs in a thread of its own that is left behind
    when it misses its deadline, because not every file system knows deadlines."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str, timeout_s: float):
        self._filesystem, self._root, self._url, self._timeout_s = filesystem, root, url, timeout_s

    def __str__(self) -> str:
        return self._url

    def directories(self) -> list[str]:
        return [name for name in self._version_directories() if self._is_committed(name)]

    def claim(self) -> None:
        """Object stores have no locks: nobody notices a second sender."""

    def release(self) -> None:
        pass

    def remove_leftovers(self) -> None:
        for name in self._version_directories():
            if not self._is_committed(name):
                self._remove_all(name)

    def require_space(self, nbytes: int) -> None:
        """What an object store has left is not known."""

    def begin(self, directory: str) -> None:
        """A directory of an object store is there with its first file."""

    def require_begun(self, directory: str) -> None:
        """Every rank sees the same store."""

    def create(self, directory: str, name: str) -> Writer:
        return _ObjectWriter(self, self._path(directory, name))

    def commit(self, directory: str, record: bytes) -> None:
        self._write(self._path(directory, COMMIT_FILE), record)

    def discard(self, directory: str) -> None:
        with suppress(WeightSyncError):
            self._remove_all(directory)

    def remove(self, directory: str) -> None:
        path = self._path(directory, COMMIT_FILE)
        self.request(f"remove {path}", lambda: self._filesystem.rm_file(path))
        self._remove_all(directory)

    def replace(self, name: str, data: bytes) -> None:
        self._write(self._path(name), data)

    def read(self, *path: str) -> bytes:
        path = self._path(*path)
        return self.request(f"read {path}", lambda: self._filesystem.cat_file(path))

    def read_into(self, targets: Sequence[torch.Tensor], offset: int, *path: str) -> int:
        path, end = self._path(*path), offset + sum(map(len, targets))
        data = memoryview(self.request(f"read {path}", lambda: self._filesystem.cat_file(path, start=offset, end=end)))
        done = 0
        for target in targets:
            piece = data[done : done + len(target)]
            memoryview(target.numpy())[: len(piece)] = piece
            done += len(piece)
        return done

    def open(self, path: str) -> fsspec.spec.AbstractBufferedFile:
        return self.request(f"create {path}", lambda: self._filesystem.open(path, "wb", block_size=REQUEST_BYTES))

    def request(self, what: str, work: Callable[[], Result]) -> Result:
        """The result of ``work``, or an error of ours, within the deadline."""
        try:
            return within(self._timeout_s, work)
        except FileNotFoundError as error:
            raise StaleHandleError(f"cannot {what}: it is not at {self._url} (any more)") from error
        except Exception as error:
            raise WeightSyncError(f"cannot {what} at {self._url}: {type(error).__name__}: {error}") from error

    def _path(self, *path: str) -> str:
        return "/".join((self._root, *path))

    def _write(self, path: str, data: bytes) -> None:
        self.request(f"write {path}", lambda: self._filesystem.pipe_file(path, data))

    def _remove_all(self, directory: str) -> None:
        path = self._path(directory)
        self._filesystem.invalidate_cache()  # other ranks write here
        self.request(f"remove {path}", lambda: self._filesystem.rm(path, recursive=True))

    def _is_committed(self, directory: str) -> bool:
        path = self._path(directory, COMMIT_FILE)
        return self.request(f"look for {path}", lambda: self._filesystem.exists(path))

    def _version_directories(self) -> list[str]:
        self._filesystem.invalidate_cache()  # other processes write here
        try:
            listed = self.request(f"list {self._root}", lambda: self._filesystem.ls(self._root, detail=True))
        except StaleHandleError:
            return []
        found = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in listed if entry["type"] == "directory")
        return [name for name in found if VERSION_DIRECTORY.fullmatch(name)]


class _ObjectWriter(Writer):
    def __init__(self, store: ObjectStore, path: str):
        self._store, self._path = store, path
        self._file = store.open(path)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), REQUEST_BYTES):
            piece = view[start : start + REQUEST_BYTES]
            self._store.request(f"write {self._path}", lambda piece=piece: self._file.write(piece))

    def close(self) -> None:
        self._store.request(f"write {self._path}", self._file.close)

    def abandon(self) -> None:
        with suppress(Exception):
            self._store.request(f"discard {self._path}", self._file.discard)
        self._file.closed = True  # or the end of the object would upload it after all
