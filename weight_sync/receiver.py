"""What all receivers share: tensors as views of received bytes, and their verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.hashing import hash_entries
from weight_sync.manifest import Manifest, TensorEntry


def view_tensors(data: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every tensor of the manifest as a view of ``data`` [bytes] uint8."""
    return {entry.name: view_tensor(data, entry) for entry in manifest.tensors}


def view_tensor(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    return data[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


def wrong_tensors(data: torch.Tensor, entries: Sequence[TensorEntry], threads: int) -> list[TensorEntry]:
    """The entries whose bytes in ``data`` [bytes] uint8 do not have the entry's hash."""
    if any(entry.xxh3_128 is None for entry in entries):
        raise WeightSyncError("these weights were sent without hashes and cannot be verified")
    found = hash_entries(data, entries, threads)
    return [entry for entry in entries if found[entry.name] != entry.xxh3_128]
