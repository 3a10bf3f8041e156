"""What the ranks of an ici sender say about a version: everything a receiver needs to plan its transfers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_sync.errors import CoverageError, StaleHandleError, WeightSyncError
from weight_sync.hashing import xxh3_128
from weight_sync.ici.buckets import Bucket, FlatRegions, cut_buckets
from weight_sync.ici.links import Store
from weight_sync.manifest import Manifest, TensorEntry
from weight_sync.plan import plan_transfers
from weight_sync.sender import Region

Wants = list | None
"""What a receiver wants, as JSON: ``[[name, offsets, shape], ...]``, or None for every tensor whole."""


@dataclass
class Publication:
    """A version, and which regions every sender rank holds of it."""

    sequence: int
    manifest: Manifest
    held: list[list[Region]]
    """By rank; no element twice."""
    bucket_bytes: int
    bucket_tensors: int | None
    backend: str
    device: str
    """Kind of the device between which the backend moves tensors."""
    flat: FlatRegions | None = None
    """On a sender rank: its regions' data."""

    def to_bytes(self) -> bytes:
        number = {entry.name: index for index, entry in enumerate(self.manifest.tensors)}
        held = [[[number[r.name], r.offsets, r.shape] for r in regions] for regions in self.held]
        fields = {
            "sequence": self.sequence,
            "manifest": self.manifest.to_json(),
            "held": held,
            "bucket_bytes": self.bucket_bytes,
            "bucket_tensors": self.bucket_tensors,
            "backend": self.backend,
            "device": self.device,
        }
        return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), level=1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Publication:
        fields = json.loads(zlib.decompress(data))
        manifest = Manifest.from_json(fields.pop("manifest"))
        held = [
            [_part(manifest.tensors[index], offsets, shape) for index, offsets, shape in regions]
            for regions in fields.pop("held")
        ]
        return cls(manifest=manifest, held=held, **fields)

    def whole(self) -> list[Region]:
        """Every tensor as a region."""
        return whole_regions(self.manifest)

    def wanted(self, wants: Wants) -> list[Region]:
        """Raises CoverageError for a tensor that this version does not have or that has no such region."""
        if wants is None:
            return self.whole()
        entries = {entry.name: entry for entry in self.manifest.tensors}
        regions = []
        for name, offsets, shape in wants:
            if name not in entries:
                raise CoverageError(f"{name}: wanted, but version {self.manifest.version} has no such tensor")
            region = _part(entries[name], offsets, shape)
            fits = len(offsets) == len(shape) == len(region.global_shape) and all(
                a >= 0 and a + n <= m for a, n, m in zip(offsets, shape, region.global_shape, strict=True)
            )
            if not fits:
                raise CoverageError(f"{name} {list(region.global_shape)}: no region of shape {shape} at {offsets}")
            regions.append(region)
        return regions

    def buckets(self, wants: Sequence[Wants]) -> list[dict[int, list[Bucket]]]:
        """What travels to a set of receivers: buckets by sender rank and receiver rank, the same wherever computed."""
        parts: list[dict[int, list[Region]]] = [{} for _ in self.held]
        for transfer in plan_transfers(self.held, [self.wanted(of_rank) for of_rank in wants]):
            parts[transfer.source].setdefault(transfer.destination, []).append(transfer.region)
        limits = self.bucket_bytes, self.bucket_tensors
        return [{receiver: cut_buckets(regions, *limits) for receiver, regions in of.items()} for of in parts]


def whole_regions(manifest: Manifest) -> list[Region]:
    """Every tensor as a region."""
    return [_part(entry, (0,) * len(entry.shape), entry.shape) for entry in manifest.tensors]


def read_publication(store: Store, handle: Mapping[str, Any]) -> Publication:
    """What the sender says about the version of a handle.

    Raises StaleHandleError if it was overwritten, WeightSyncError if this is not what was said, RuntimeError if the
    store is gone.
    """
    data = store.get_bytes(publication_key(handle["sequence"]))
    if data is None:
        raise StaleHandleError(f"version {handle['version']} was overwritten by a later one")
    if xxh3_128(data) != handle["publication_xxh3_128"]:
        raise WeightSyncError(f"version {handle['version']}: what the sender says about it arrived damaged")
    return Publication.from_bytes(data)


def publication_key(sequence: int) -> str:
    """Where the store has a publication."""
    return f"publication/{sequence}"


def _part(entry: TensorEntry, offsets: Sequence[int], shape: Sequence[int]) -> Region:
    return Region(entry.name, entry.torch_dtype, entry.shape, tuple(offsets), tuple(shape))
