"""Work in portions: shares of about equal bytes, and batches of limited bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weight_sync.manifest import aligned
from weight_sync.portions import batches, share_out


@dataclass(frozen=True)
class Item:
    nbytes: int


def sizes(groups) -> list[list[int]]:
    return [[item.nbytes for item in group] for group in groups]


def items(*nbytes: int) -> list[Item]:
    return [Item(n) for n in nbytes]


def test_the_largest_goes_to_who_has_the_least():
    assert sizes(share_out(items(1, 5, 3, 4), [0, 0])) == [[5, 1], [4, 3]]
    assert sizes(share_out(items(1, 5, 3, 4), [9, 0])) == [[3], [5, 4, 1]]
    assert sizes(share_out([], [0, 0, 0])) == [[], [], []]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"nbytes": 10}, [[4, 6], [3], [25], [0, 1, 1]]),
        ({"nbytes": 10, "count": 1}, [[4], [6], [3], [25], [0], [1], [1]]),
        ({"nbytes": 512, "size": aligned}, [[4, 6], [3, 25, 0], [1, 1]]),
    ],
)
def test_batches_keep_the_order_and_the_limits(limits, expected):
    found = sizes(batches(items(4, 6, 3, 25, 0, 1, 1), **limits))
    assert found == expected


def test_no_items_make_no_batch():
    assert list(batches([], 10)) == []
