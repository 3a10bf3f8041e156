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

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all micro-batches and all ranks: one collective for each kind. All ranks call this."""
        sums = {name: torch.stack(values).sum() for name, values in self._sums.items()}
        maxima = {name: torch.stack(values).amax() for name, values in self._maxima.items()}
        return _over_ranks(sums, dist.ReduceOp.SUM), _over_ranks(maxima, dist.ReduceOp.MAX)


def _over_ranks(values: dict[str, torch.Tensor], operation: dist.ReduceOp) -> dict[str, float]:
    if not values:
        return {}
    stacked = torch.stack(list(values.values()))
    if dist.get_world_size() > 1:
        dist.all_reduce(stacked, operation)
    return dict(zip(values, stacked.tolist(), strict=True))
