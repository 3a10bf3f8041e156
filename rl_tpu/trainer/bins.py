"""Sorting lengths into rows, and rows to ranks. Numbers only: no samples, no tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` grouped so that no group's sum exceeds `capacity`: the longest first, each into the group
    with the least space that still fits it. At most 11/9 of the fewest possible groups, plus one (Johnson, 1974)."""
    groups: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, group), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(spaces, (lengths[index], -1))
        if at == len(spaces):
            space, group = capacity, len(groups)
            groups.append([])
        else:
            space, group = spaces.pop(at)
        groups[group].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], group))
    return groups


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of `costs` as `ranks` hands of equal count and about equal sum, the dearest first in each.

    The costs are dealt in rounds of one to each rank, so that what the ranks do at the same time costs about the same;
    in a round the rank with the least so far takes the dearest.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    hands: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for start in range(0, len(order), ranks):
        for rank, index in zip(sorted(range(ranks), key=sums.__getitem__), order[start : start + ranks], strict=True):
            hands[rank].append(index)
            sums[rank] += costs[index]
    return hands
