"""Statistics over the tokens of a minibatch, gathered per micro-batch and reduced over all ranks at its end."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist


class Tally:
    """Sums and maxima by name. They stay on the device until `reduce`, so a micro-batch costs no synchronisation."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._maxima: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, **values: torch.Tensor) -> None:
        """Add the sum of each tensor to its name."""
        for name, value in values.items():
            self._sums[name].append(value.detach().sum())

    def maximum(self, **values: torch.Tensor) -> None:
        """Raise each name to the largest element of its tensor."""
        for name, value in values.items():
            self._maxima[name].append(value.detach().amax())

    def reduce(self, ranks: dist.ProcessGroup | None) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all micro-batches and all of `ranks`, which all call this (None: this rank alone): one
        collective for each kind."""
        sums = {name: torch.stack(values).sum() for name, values in self._sums.items()}
        maxima = {name: torch.stack(values).amax() for name, values in self._maxima.items()}
        return _over_ranks(sums, dist.ReduceOp.SUM, ranks), _over_ranks(maxima, dist.ReduceOp.MAX, ranks)


def _over_ranks(
    values: dict[str, torch.Tensor], operation: dist.ReduceOp, ranks: dist.ProcessGroup | None
) -> dict[str, float]:
    if not values:
        return {}
    stacked = torch.stack(list(values.values()))
    if ranks is not None:
        dist.all_reduce(stacked, operation, group=ranks)
    return dict(zip(values, stacked.tolist(), strict=True))
