"""Hashes of whole tensors that lie in parts on several ranks: each tensor is gathered on one of them, which hashes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from weight_sync.hashing import in_threads, xxh3_128
from weight_sync.ici.buckets import FlatRegions, Staging, cut_buckets, receive_buckets, send_buckets
from weight_sync.ici.links import Group
from weight_sync.plan import plan_transfers
from weight_sync.portions import share_out
from weight_sync.sender import Region


class ShardedHashes:
    """One rank's part in hashing tensors of one layout again and again.

    A rank that holds a whole tensor hashes it where it lies; the others are shared out by bytes, and the memory to gather
    a rank's share (on average 1/ranks of all bytes) is kept.

    held          regions of each rank, no element twice
    tensors       every tensor as a whole region
    """

    def __init__(
        self,
        held: Sequence[Sequence[Region]],
        tensors: Sequence[Region],
        rank: int,
        device: torch.device,
        bucket_bytes: int,
        bucket_tensors: int | None,
    ):
        whole, gathered = _assign(held, tensors)
        self._rank, self._whole = rank, whole[rank]
        self._gathered = gathered[rank]
        self._flat = FlatRegions(self._gathered)
        self._flat.allocate(device)
        self._staging = Staging(device)
        wanted = {region.name for region in self._gathered}
        self._own = [part for part in held[rank] if part.name in wanted]
        parts: dict[tuple[int, int], list[Region]] = defaultdict(list)
        for transfer in plan_transfers(held, gathered, same_process={rank: rank for rank in range(len(held))}):
            parts[transfer.source, transfer.destination].append(transfer.region)

        def turn(pair: tuple[int, int]) -> tuple[int, int, int]:
            distance = (pair[1] - pair[0]) % len(held)
            return distance, pair[0] // distance % 2, pair[0]

        # All ranks go through the pairs in one order, so that none waits for another in a circle; pairs at the same
        # distance with different ranks have their turn together.
        self._pairs = [
            (pair, cut_buckets(parts[pair], bucket_bytes, bucket_tensors)) for pair in sorted(parts, key=turn)
        ]

    def make(self, flat: FlatRegions, group: Group | None, threads: int) -> dict[str, str]:
        """Collective. xxh3-128 by name of the tensors that fall to this rank, whose regions' data are in ``flat``.

        Raises RuntimeError if another rank is gone.
        """
        for part in self._own:
            self._flat.view(part).copy_(flat.view(part))
        for (source, destination), buckets in self._pairs:
            if self._rank == source:
                send_buckets(group, {destination: buckets}, flat, self._staging)
            elif self._rank == destination:
                receive_buckets(group, {source: buckets}, self._flat, self._staging)

        todo = [(region, flat) for region in self._whole] + [(region, self._flat) for region in self._gathered]
        todo.sort(key=lambda item: -item[0].nbytes)

        def digest(item: tuple[Region, FlatRegions]) -> str:
            region, where = item
            return xxh3_128(where.bytes_of(region).cpu())

        return {region.name: value for (region, _), value in zip(todo, in_threads(digest, todo, threads), strict=True)}


def _assign(
    held: Sequence[Sequence[Region]], tensors: Sequence[Region]
) -> tuple[list[list[Region]], list[list[Region]]]:
    """By rank: the tensors it holds whole, and those it gathers, shared out by bytes, the largest first."""
    holder = {region: rank for rank, regions in enumerate(held) for region in regions}
    whole: list[list[Region]] = [[] for _ in held]
    in_parts = []
    for region in tensors:
        if region in holder or not region.size:
            whole[holder.get(region, 0)].append(region)
        else:
            in_parts.append(region)
    return whole, share_out(in_parts, [sum(region.nbytes for region in of_rank) for of_rank in whole])
