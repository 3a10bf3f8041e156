"""What receivers share: checks of handles, tensors as views of received bytes, and their verification."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.hashing import hash_entries
from weight_sync.manifest import Manifest, TensorEntry

MAP_NORESERVE = 0x4000  # absent from the mmap module before Python 3.13


def require_transport(handle: Mapping[str, Any], transport: str, *fields: str) -> None:
    """Raises WeightSyncError unless it is a handle of that transport with those ``fields``."""
    if not isinstance(handle, Mapping):
        raise WeightSyncError(f"not a handle of the {transport} transport: {type(handle).__name__} instead of a dict")
    if handle.get("transport") != transport:
        raise WeightSyncError(
            f"not a handle of the {transport} transport: its transport is {handle.get('transport')!r}"
        )
    if missing := [name for name in fields if handle.get(name) is None]:
        raise WeightSyncError(f"not a whole handle of the {transport} transport: it lacks {', '.join(missing)}")


def require_version(handle: Mapping[str, Any], manifest: Manifest) -> None:
    """Raises WeightSyncError if a handle speaks of another version than what it leads to."""
    if handle["version"] != manifest.version:
        raise WeightSyncError(f"the handle says version {handle['version']}, what it leads to is {manifest.version}")


def require_hashes(entries: Iterable[TensorEntry]) -> None:
    if any(entry.xxh3_128 is None for entry in entries):
        raise WeightSyncError("these weights were sent without hashes and cannot be verified")


def map_private(fd: int) -> mmap.mmap:
    """A file in memory, without a copy; it stays readable when it is removed. Writing changes a private copy of a page."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def view_tensors(data: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every tensor of the manifest as a view of ``data`` [bytes] uint8."""
    return {entry.name: view_tensor(data, entry) for entry in manifest.tensors}


def view_tensor(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    return data[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


def wrong_tensors(data: torch.Tensor, entries: Sequence[TensorEntry], threads: int) -> list[TensorEntry]:
    """The entries whose bytes in ``data`` [bytes] uint8 do not have the entry's hash."""
    require_hashes(entries)
    found = hash_entries(data, entries, threads)
    return [entry for entry in entries if found[entry.name] != entry.xxh3_128]
