"""Statistics over the tokens of a minibatch, gathered per micro-batch and reduced over all ranks at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist


class Tally:
    """Means, totals and maxima by name. They stay on the device until `reduce`: a micro-batch costs no synchronisation.

    `ranks` are those whose rows differ; None: this one sees all of them.
    """

    def __init__(self, ranks: dist.ProcessGroup | None = None) -> None:
        self._ranks = ranks
        self._sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._totals: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._maxima: dict[str, list[torch.Tensor]] = defaultdict(list)

    def mean(self, **values: torch.Tensor) -> None:
        """Tensors of one value per token, zero outside the mask, whose mean over the loss tokens is wanted."""
        for name, value in values.items():
            self._sums[name].append(value.detach().sum())

    def total(self, **values: torch.Tensor) -> None:
        """Tensors whose sum is wanted."""
        for name, value in values.items():
            self._totals[name].append(value.detach().sum())

    def maximum(self, **values: torch.Tensor) -> None:
        """Tensors whose largest element is wanted."""
        for name, value in values.items():
            self._maxima[name].append(value.detach().amax())

    def entries(self) -> dict[str, torch.Tensor]:
        """All that was gathered, as scalars: `sum/NAME`, `total/NAME` and `maximum/NAME`."""
        sums = {f"sum/{name}": torch.stack(values).sum() for name, values in self._sums.items()}
        totals = {f"total/{name}": torch.stack(values).sum() for name, values in self._totals.items()}
        return sums | totals | {f"maximum/{name}": torch.stack(each).amax() for name, each in self._maxima.items()}

    def include(self, entries: Mapping[str, torch.Tensor]) -> None:
        """What another tally's `entries` say."""
        tables = {"sum": self._sums, "total": self._totals, "maximum": self._maxima}
        for key, value in entries.items():
            kind, name = key.split("/", 1)
            tables[kind][name].append(value)

    def reduce(self, tokens: float) -> dict[str, float]:
        """Everything over all micro-batches and ranks, `tokens` being the loss tokens of them all: one collective for
        sums and one for maxima. All ranks call this."""
        sums = {name: torch.stack(values).sum() for name, values in (self._sums | self._totals).items()}
        maxima = {name: torch.stack(values).amax() for name, values in self._maxima.items()}
        reduced = self._over_ranks(sums, dist.ReduceOp.SUM) | self._over_ranks(maxima, dist.ReduceOp.MAX)
        return {name: value / max(1.0, tokens) if name in self._sums else value for name, value in reduced.items()}

    def _over_ranks(self, values: dict[str, torch.Tensor], operation: dist.ReduceOp) -> dict[str, float]:
        if not values:
            return {}
        stacked = torch.stack(list(values.values()))
        if self._ranks is not None:
            dist.all_reduce(stacked, operation, group=self._ranks)
        return dict(zip(values, stacked.tolist(), strict=True))
