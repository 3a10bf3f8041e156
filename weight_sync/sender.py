"""What all senders share: ranks that fail together, the layout made from everybody's shards, hashing shared out."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from weight_sync.errors import CoverageError, WeightSyncError
from weight_sync.hashing import hash_entries, xxh3_128
from weight_sync.manifest import Manifest
from weight_sync.portions import share_out
from weight_sync.shard import Shard

Result = TypeVar("Result")
MOST_NAMED = 16
"""Regions listed in an error."""


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
        result = failure = cause = None
        try:
            result = work()
        except WeightSyncError as error:
            failure = cause = error
        except Exception as error:
            failure, cause = WeightSyncError(f"rank {self.rank}: {type(error).__name__}: {error}"), error
        everyone = self._gather((result, failure))
        first = next((error for _, error in everyone if error is not None), None)
        if first is not None:
            raise first from (cause if cause is not first else first.__cause__)
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

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the region in the whole tensor."""
        return tuple(slice(start, start + extent) for start, extent in zip(self.offsets, self.shape, strict=True))

    def narrow(self, dim: int, start: int, end: int) -> Region:
        """The part between two indices of the whole tensor along ``dim``."""
        offsets, shape = list(self.offsets), list(self.shape)
        offsets[dim], shape[dim] = start, end - start
        return replace(self, offsets=tuple(offsets), shape=tuple(shape))

    def contains(self, element: tuple[int, ...]) -> bool:
        spans = zip(self.offsets, self.shape, element, strict=True)
        return all(start <= at < start + extent for start, extent, at in spans)

    def __str__(self) -> str:
        spans = zip(self.offsets, self.shape, strict=True)
        return f"[{', '.join(f'{start}:{start + extent}' for start, extent in spans)}]"


class Agreed(NamedTuple):
    """What the ranks found when they compared notes at the begin of a publish."""

    regions: list[Region]
    """Of this rank's shards, in their order."""
    shards: dict[Region, Shard]
    """This rank's, by region."""
    digests: list[str]
    """By rank: of its regions, in their order."""
    notes: list
    """By rank: what else it said."""


def agree(
    ranks: Ranks, version: int, shards: Iterable[Shard], sequence: int = 0, note: Callable[[], Any] = lambda: None
) -> Agreed:
    """Collective, the begin of a publish: take every rank's shards, and what its ``note`` returns.

    ``sequence`` counts this rank's publishes. Raises WeightSyncError if it or ``version`` is not the same on all ranks.
    """
    mine: list[Shard] = []
    regions: list[Region] = []

    def describe() -> tuple[int, int, str, Any]:
        if not isinstance(version, int) or version < 0:
            raise WeightSyncError(f"a version is a whole number from 0 on, not {version!r}")
        mine.extend(shards)
        regions.extend(map(Region.of, mine))
        return version, sequence, xxh3_128(repr(regions).encode()), note()

    versions, sequences, digests, notes = map(list, zip(*ranks.exchange(describe), strict=True))
    if len(set(versions)) > 1:
        raise WeightSyncError(f"the ranks publish different versions: {versions}")
    if len(set(sequences)) > 1:
        raise WeightSyncError(f"the ranks have called publish {sequences} times: open the sender anew on all of them")
    return Agreed(regions, dict(zip(regions, mine, strict=True)), digests, notes)


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
    tensors = []
    writes: list[list[Region]] = [[] for _ in regions]
    load = [0] * len(regions)
    for name, of_tensor in holders_of(regions).items():
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


def holders_of(regions: Sequence[Sequence[Region]]) -> dict[str, dict[Region, list[int]]]:
    """The ranks (outer list) that hold each region, by tensor, in order of first appearance."""
    holders: dict[str, dict[Region, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, held in enumerate(regions):
        for region in held:
            holders[region.name][region].append(rank)
    return holders


def _check_coverage(name: str, holders: dict[Region, list[int]]) -> None:
    first = next(iter(holders))
    for region, ranks in holders.items():
        if len(set(ranks)) < len(ranks):
            raise CoverageError(f"{name}: rank {Counter(ranks).most_common(1)[0][0]} gives region {region} twice")
        if (region.dtype, region.global_shape) != (first.dtype, first.global_shape):
            raise CoverageError(
                f"{name}: rank {holders[first][0]} says {first.dtype} {list(first.global_shape)}, "
                f"rank {ranks[0]} says {region.dtype} {list(region.global_shape)}"
            )
    whole = Region(name, first.dtype, first.global_shape, (0,) * len(first.global_shape), first.global_shape)
    wrong = _first_difference(holders, [whole])
    if wrong is None:
        return
    tensor, there = f"{name} {list(first.global_shape)}", [region for region in holders if region.contains(wrong)]
    if len(there) > 1:
        one, other = there[:2]
        raise CoverageError(
            f"{tensor}: region {one} of rank {holders[one][0]} overlaps region {other} of rank {holders[other][0]}"
        )
    held = ", ".join(f"rank {ranks[0]} {region}" for region, ranks in itertools.islice(holders.items(), MOST_NAMED))
    more = f" and {len(holders) - MOST_NAMED} more" if len(holders) > MOST_NAMED else ""
    covered = sum(region.size for region in holders)
    raise CoverageError(f"{tensor}: {covered} of {whole.size} elements, none at {list(wrong)}: {held}{more}")


def _first_difference(some: Iterable[Region], others: Iterable[Region]) -> tuple[int, ...] | None:
    """The first element that is in more regions of ``some`` than of ``others``, or in fewer; None if there is none.

    Adds up the corners of all regions, with signs that alternate along the edges. Those sums are the differences along
    every dimension of how often an element is covered: none is left if and only if the counts are equal everywhere, and
    the first that is left lies at the first element where they are not. It takes time in proportion to the regions.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for regions, sign in ((some, 1), (others, -1)):
        for region in regions:
            edges = [((at, 1), (at + extent, -1)) for at, extent in zip(region.offsets, region.shape, strict=True)]
            for corner in itertools.product(*edges):
                corners[tuple(at for at, _ in corner)] += sign * math.prod(side for _, side in corner)
    return min((corner for corner, count in corners.items() if count), default=None)


def hash_together(
    ranks: Ranks, manifest: Manifest, data: torch.Tensor, threads: int, known: dict[str, str]
) -> Manifest:
    """Collective: the manifest with the hash of every tensor in ``data`` [bytes] uint8; each rank hashes its share of
    those that are not ``known`` (the same on every rank)."""
    hashes = dict(known)
    unknown = [entry for entry in manifest.tensors if entry.name not in known]
    if unknown:
        mine = share_out(unknown, [0] * ranks.world_size)[ranks.rank]
        for part in ranks.exchange(lambda: hash_entries(data, mine, threads)):
            hashes |= part
    return manifest.with_hashes(hashes)


def stats_of(manifest: Manifest, start: float, agreed: float, copied: float, end: float) -> dict[str, float]:
    """A sender's ``stats`` from the times [s] at which it began, all ranks agreed, had copied, and had hashed."""
    return {
        "prepare_s": agreed - start,
        "copy_s": copied - agreed,
        "hash_s": end - copied,
        "total_s": end - start,
        "total_bytes": manifest.total_bytes,
    }
