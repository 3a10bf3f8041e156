"""What all senders share: ranks that fail together, the layout made from everybody's shards, hashing shared out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from weight_sync.errors import CoverageError, WeightSyncError
from weight_sync.hashing import hash_entries, share_out
from weight_sync.manifest import Manifest
from weight_sync.shard import Shard

Result = TypeVar("Result")


class Ranks:
    """The ranks of a sender. One rank alone needs no process group.

    ``group`` is a torch.distributed group with a CPU backend (gloo); its timeout bounds every wait for another rank.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None):
        if world_size > 1 and group is None:
            raise WeightSyncError(f"a sender of {world_size} ranks needs a process group (gloo)")
        if group is not None and (dist.get_rank(group), dist.get_world_size(group)) != (rank, world_size):
            raise WeightSyncError(
                f"rank {rank} of {world_size} was given a process group in which it is rank {dist.get_rank(group)} "
                f"of {dist.get_world_size(group)}"
            )
        self.rank, self.world_size, self._group = rank, world_size, group

    def exchange(self, work: Callable[[], Result]) -> list[Result]:
        """Collective: do ``work`` on every rank and return all results, by rank. If one fails, every rank raises."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        shared = failure
        if failure is not None and not isinstance(failure, WeightSyncError):
            shared = WeightSyncError(f"rank {self.rank}: {type(failure).__name__}: {failure}")
        everyone = self._gather((result, shared))
        first = next((error for _, error in everyone if error is not None), None)
        if first is not None:
            raise first from failure
        return [result for result, _ in everyone]

    def _gather(self, mine: tuple) -> list[tuple]:
        if self.world_size == 1:
            return [mine]
        everyone = [None] * self.world_size
        try:
            dist.all_gather_object(everyone, mine, group=self._group)
        except RuntimeError as error:
            raise WeightSyncError(f"rank {self.rank} of {self.world_size} lost the other ranks: {error}") from error
        return everyone


@dataclass(frozen=True)
class Region:
    """What a shard says about itself: everything but the data."""

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shard: Shard) -> Region:
        return cls(shard.name, shard.dtype, shard.global_shape, shard.offsets, tuple(shard.data.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return self.shape == self.global_shape

    def overlaps(self, other: Region) -> bool:
        spans = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in spans)

    def __str__(self) -> str:
        spans = zip(self.offsets, self.shape, strict=True)
        return f"[{', '.join(f'{start}:{start + extent}' for start, extent in spans)}]"


@dataclass(frozen=True)
class Layout:
    """Where every tensor lies (a manifest without hashes) and which regions each rank writes, largest first."""

    manifest: Manifest
    writes: list[list[Region]]


def make_layout(regions: list[list[Region]]) -> Layout:
    """Lay out the tensors that the ranks' regions (outer list: ranks) make up, in order of first appearance.

    Identical regions of several ranks are replicas: the rank with the least to write so far writes them. Raises
    CoverageError if, replicas aside, the regions do not cover every tensor exactly once, or disagree about it.
    """
    if not any(regions):
        raise CoverageError("no rank has a shard to publish")
    holders: dict[str, dict[Region, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, held in enumerate(regions):
        for region in held:
            if rank in holders[region.name][region]:
                raise CoverageError(f"{region.name}: rank {rank} gives region {region} twice")
            holders[region.name][region].append(rank)
    tensors = []
    writes: list[list[Region]] = [[] for _ in regions]
    load = [0] * len(regions)
    for name, of_tensor in holders.items():
        _check_coverage(name, of_tensor)
        first = next(iter(of_tensor))
        tensors.append((name, first.dtype, first.global_shape))
        for region, ranks in of_tensor.items():
            writer = min(ranks, key=lambda rank: load[rank])
            writes[writer].append(region)
            load[writer] += region.nbytes
    for own in writes:
        own.sort(key=lambda region: -region.nbytes)
    return Layout(Manifest.lay_out(tensors), writes)


def _check_coverage(name: str, holders: dict[Region, list[int]]) -> None:
    first = next(iter(holders))
    for region, ranks in holders.items():
        if (region.dtype, region.global_shape) != (first.dtype, first.global_shape):
            raise CoverageError(
                f"{name}: rank {holders[first][0]} says {first.dtype} {list(first.global_shape)}, "
                f"rank {ranks[0]} says {region.dtype} {list(region.global_shape)}"
            )
    for one, other in itertools.combinations(holders, 2):
        if one.overlaps(other):
            raise CoverageError(
                f"{name} {list(first.global_shape)}: region {one} of rank {holders[one][0]} overlaps region {other} "
                f"of rank {holders[other][0]}"
            )
    covered, wanted = sum(region.size for region in holders), math.prod(first.global_shape)
    if covered != wanted:
        held = ", ".join(f"rank {ranks[0]} {region}" for region, ranks in holders.items())
        raise CoverageError(f"{name} {list(first.global_shape)}: {covered} of {wanted} elements are there: {held}")


def hash_together(
    ranks: Ranks, manifest: Manifest, data: torch.Tensor, threads: int, known: dict[str, str]
) -> Manifest:
    """Collective: the manifest with the hash of every tensor in ``data`` [bytes] uint8; each rank hashes its share of
    those that are not ``known`` (the same on every rank)."""
    hashes = dict(known)
    unknown = [entry for entry in manifest.tensors if entry.name not in known]
    if unknown:
        mine = share_out(unknown, ranks.world_size)[ranks.rank]
        for part in ranks.exchange(lambda: hash_entries(data, mine, threads)):
            hashes |= part
    tensors = tuple(dataclasses.replace(entry, xxh3_128=hashes[entry.name]) for entry in manifest.tensors)
    return dataclasses.replace(manifest, tensors=tensors)
