"""What a policy version consists of: name, dtype, shape, byte range and xxh3-128 of every tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from weight_sync.errors import WeightSyncError

ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this: enough for any dtype, vector load and DMA engine."""


def aligned(nbytes: int, to: int = ALIGNMENT_BYTES) -> int:
    """The next multiple of ``to``."""
    return -(-nbytes // to) * to


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its Hugging Face name, and where its row-major bytes lie.

    ``dtype`` is torch's name without the prefix (``bfloat16``), ``offset`` and ``nbytes`` count bytes from the start of
    the data, ``xxh3_128`` is the hash of those bytes as 32 hex digits (None: the sender did not hash).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3_128: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class ManifestDiff:
    """Names, by what became of them between two versions."""

    changed: list[str]
    """Other bytes, dtype or shape; also a tensor that one of the two versions has no hash of."""
    unchanged: list[str]
    added: list[str]
    """Only the newer version has it."""
    missing: list[str]
    """Only the older version has it."""


@dataclass(frozen=True)
class Manifest:
    """All tensors of policy ``version``; ``total_bytes`` is the length of the data, padding included."""

    version: int
    tensors: tuple[TensorEntry, ...]
    total_bytes: int

    @classmethod
    def lay_out(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], version: int = 0) -> Manifest:
        """Place (name, dtype, shape) one after another in the given order, each aligned, without hashes."""
        entries, offset = [], 0
        for name, dtype, shape in tensors:
            nbytes = math.prod(shape) * dtype.itemsize
            entries.append(TensorEntry(name, dtype_name(dtype), tuple(shape), offset, nbytes))
            offset += aligned(nbytes)
        return cls(version, tuple(entries), offset)

    def with_hashes(self, hashes: Mapping[str, str]) -> Manifest:
        """The same with these hashes, by name; tensors without one there have none."""
        tensors = tuple(replace(entry, xxh3_128=hashes.get(entry.name)) for entry in self.tensors)
        return replace(self, tensors=tensors)

    def diff(self, newer: Manifest) -> ManifestDiff:
        """What ``newer`` changed, left alone, added and lost, compared with this version."""
        before, after = ({entry.name: entry for entry in manifest.tensors} for manifest in (self, newer))

        def content(entry: TensorEntry) -> tuple:
            return entry.dtype, entry.shape, entry.xxh3_128

        same = {
            name
            for name in before.keys() & after.keys()
            if before[name].xxh3_128 is not None and content(before[name]) == content(after[name])
        }
        return ManifestDiff(
            changed=[name for name in after if name in before and name not in same],
            unchanged=[name for name in after if name in same],
            added=[name for name in after if name not in before],
            missing=[name for name in before if name not in after],
        )

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"tensors": [vars(entry) for entry in self.tensors]}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises WeightSyncError if the text is no manifest or its byte ranges contradict themselves."""
        try:
            fields = json.loads(text)
            tensors = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["tensors"])
            manifest = cls(fields["version"], tensors, fields["total_bytes"])
            end = 0
            for entry in tensors:
                if entry.nbytes != math.prod(entry.shape) * entry.torch_dtype.itemsize:
                    raise ValueError(f"{entry.name}: {entry.nbytes} bytes do not make {entry.dtype} {entry.shape}")
                if entry.offset < end or entry.offset % ALIGNMENT_BYTES:
                    raise ValueError(f"{entry.name}: offset {entry.offset} overlaps its neighbour or is not aligned")
                end = entry.offset + entry.nbytes
            if end > manifest.total_bytes:
                raise ValueError(f"tensors end at byte {end}, the data at {manifest.total_bytes}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightSyncError(f"not a weight manifest: {type(error).__name__}: {error}") from error
        return manifest
