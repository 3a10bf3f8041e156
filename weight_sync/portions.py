"""Work in portions: of about equal bytes for those who share it, or of limited bytes one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


def share_out(items: Iterable[Item], load: Sequence[int]) -> list[list[Item]]:
    """A share for everybody, who has ``load`` [bytes] already: the largest first, each to who has the least so far.

    The same in every process.
    """
    load = list(load)
    shares: list[list[Item]] = [[] for _ in load]
    for item in sorted(items, key=lambda item: -item.nbytes):
        least = load.index(min(load))
        shares[least].append(item)
        load[least] += item.nbytes
    return shares


def batches(
    items: Iterable[Item], nbytes: int, count: int | None = None, size: Callable[[int], int] = int
) -> Iterator[list[Item]]:
    """Neighbours together, at most ``count`` and ``nbytes`` where an item of n bytes takes up ``size(n)``; a larger item
    is alone."""
    batch: list[Item] = []
    filled = 0
    for item in items:
        if batch and (filled + size(item.nbytes) > nbytes or len(batch) == count):
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size(item.nbytes)
    if batch:
        yield batch
