"""Version directories on a local path or any fsspec URL: each appears whole or not at all.

A local directory is written under a temporary name, flushed to the disk and renamed. Object stores cannot rename, so
there the commit file is written last, and a directory without one does not exist for readers. Nothing is ever written
into a directory that was committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from weight_sync.disk.storage.base import COMMIT_FILE, REQUEST_BYTES, Store, Writer
from weight_sync.disk.storage.local import LocalStore
from weight_sync.disk.storage.objects import ObjectStore
from weight_sync.errors import WeightSyncError

__all__ = ["COMMIT_FILE", "REQUEST_BYTES", "LocalStore", "ObjectStore", "Store", "Writer", "open_store"]


def open_store(
    url: str, storage_options: dict[str, Any] | None = None, timeout_s: float = 120, fsync: bool = True
) -> Store:
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
