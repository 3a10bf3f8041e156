"""Whole tensors from the ranks' regions, each made by one owner: the work is shared out and nothing meets on rank 0.

Owners make their tensors bucket by bucket, all at the same time. In every round each rank sends each owner at most one
message with its regions of that owner's bucket; a region travels once, from one of its holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weight_sync.errors import WeightSyncError
from weight_sync.manifest import TensorEntry, aligned
from weight_sync.sender import Region, holders_of
from weight_sync.shard import Shard


@dataclass(frozen=True)
class Ownership:
    """Which rank makes each tensor, and from whose regions."""

    owned: list[list[TensorEntry]]
    """By rank, in the order of the manifest."""
    pieces: dict[str, list[tuple[int, Region]]]
    """The (holder, region) that make up a tensor, by name; replicas are left out."""


def assign_owners(regions: Sequence[Sequence[Region]], entries: Sequence[TensorEntry]) -> Ownership:
    """Owners of about equal bytes for the tensors that the ranks' ``regions`` (outer: ranks) make up.

    A tensor goes, largest first, to the rank with the least to write and receive; the same on every rank.
    """
    ranks = range(len(regions))
    holders = holders_of(regions)
    load, sent = [0] * len(regions), [0] * len(regions)
    owner: dict[str, int] = {}
    pieces: dict[str, list[tuple[int, Region]]] = {}
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        of_tensor = holders[entry.name]
        held = [sum(region.nbytes for region, having in of_tensor.items() if rank in having) for rank in ranks]
        mine = min(ranks, key=[weight - has for weight, has in zip(load, held, strict=True)].__getitem__)
        load[mine] += entry.nbytes
        owner[entry.name], pieces[entry.name] = mine, []
        for region, having in of_tensor.items():
            holder = mine if mine in having else min(having, key=lambda rank: sent[rank])
            sent[holder] += region.nbytes if holder != mine else 0
            pieces[entry.name].append((holder, region))
    owned = [[entry for entry in entries if owner[entry.name] == rank] for rank in ranks]
    return Ownership(owned, pieces)


@dataclass
class Gatherer:
    """One rank's end of the rounds. Its buffers are kept and used again: the first touch of memory is slow."""

    rank: int
    group: dist.ProcessGroup | None
    _buffers: dict[tuple, torch.Tensor] = field(default_factory=dict)
    _round: int = 0
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _outgoing: dict[int, torch.Tensor] = field(default_factory=dict)
    _incoming: dict[int, tuple[torch.Tensor, list[Region]]] = field(default_factory=dict)

    def stage(
        self,
        pieces: dict[str, list[tuple[int, Region]]],
        buckets: list[list[TensorEntry]],
        shards: dict[Region, Shard],
    ) -> None:
        """Prepare one round: copy this rank's regions of every owner's bucket (``buckets``, by rank) to where they are
        sent from or belong. ``shards`` are this rank's, by region."""
        self._round += 1
        self._tensors, self._outgoing, self._incoming = {}, {}, {}
        arriving: dict[int, list[Region]] = defaultdict(list)
        place = 0
        space = self._buffer(("tensors", self._round % 2), sum(aligned(e.nbytes) for e in buckets[self.rank]))
        for entry in buckets[self.rank]:
            whole = self._in_place(entry, pieces[entry.name], shards)
            if whole is None:
                whole = space[place : place + entry.nbytes]
                place += aligned(entry.nbytes)
                for holder, region in pieces[entry.name]:
                    if holder == self.rank:
                        _select(whole, region).copy_(shards[region].data.detach())
                    else:
                        arriving[holder].append(region)
            self._tensors[entry.name] = whole
        for holder, regions in arriving.items():
            self._incoming[holder] = self._buffer(("incoming", holder), _span(regions)), regions
        for owner, bucket in enumerate(buckets):
            if owner != self.rank:
                mine = [region for entry in bucket for holder, region in pieces[entry.name] if holder == self.rank]
                if mine:
                    message = self._buffer(("outgoing", owner), _span(mine))
                    for region, part in _parts(message, mine):
                        part.copy_(shards[region].data.detach())
                    self._outgoing[owner] = message

    def swap(self) -> dict[str, torch.Tensor]:
        """Collective: send and receive what was staged. The tensors [bytes] uint8 of this rank's bucket, by name; they
        are overwritten by the round after the next.

        Raises WeightSyncError if a rank is lost or late by the group's timeout.
        """
        try:
            waiting = [
                dist.irecv(message, group=self.group, group_src=holder)
                for holder, (message, _) in self._incoming.items()
            ]
            waiting += [
                dist.isend(message, group=self.group, group_dst=owner) for owner, message in self._outgoing.items()
            ]
            for work in waiting:
                work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"rank {self.rank} lost another rank while they exchanged shards: {error}") from error
        for message, regions in self._incoming.values():
            for region, part in _parts(message, regions):
                _select(self._tensors[region.name], region).copy_(part)
        return self._tensors

    def release(self) -> None:
        """Forget the last round's tensors, which may be views of the caller's."""
        self._tensors, self._outgoing, self._incoming = {}, {}, {}

    def _in_place(
        self, entry: TensorEntry, pieces: list[tuple[int, Region]], shards: dict[Region, Shard]
    ) -> torch.Tensor | None:
        """The tensor's bytes where the caller has them, if this rank holds them all just as they are published."""
        if len(pieces) != 1 or pieces[0][0] != self.rank:
            return None
        data = shards[pieces[0][1]].data.detach()
        if data.device.type != "cpu" or data.dtype != entry.torch_dtype or not data.is_contiguous():
            return None
        return data.reshape(-1).view(torch.uint8)

    def _buffer(self, key: tuple, nbytes: int) -> torch.Tensor:
        if key not in self._buffers or len(self._buffers[key]) < nbytes:
            self._buffers[key] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[key][:nbytes]


def _span(regions: list[Region]) -> int:
    return sum(aligned(region.nbytes) for region in regions)


def _parts(message: torch.Tensor, regions: list[Region]) -> Iterator[tuple[Region, torch.Tensor]]:
    """Each region with its place in the message."""
    start = 0
    for region in regions:
        yield region, message[start : start + region.nbytes].view(region.dtype).view(region.shape)
        start += aligned(region.nbytes)


def _select(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a tensor that is given as bytes."""
    return whole.view(region.dtype).view(region.global_shape)[region.slices]
