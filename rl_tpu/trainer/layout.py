"""Which rows a rank sees."""

from __future__ import annotations

from dataclasses import dataclass

from rl_tpu.config.schema import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """The place of `rank` among all `ranks`. Ranks that share matrices (tensor parallelism) are neighbours and see the
    same rows: together they are one data rank."""

    ranks: int
    rank: int
    parallel: ParallelConfig

    @property
    def data_ranks(self) -> int:
        """How many ways rows are divided."""
        return self.ranks // self.parallel.tensor

    @property
    def data_rank(self) -> int:
        """Whose share of the rows this rank sees."""
        return self.rank // self.parallel.tensor
