"""FSDP inside a program: each rank has a share of every parameter, gathers it where it is used, and sums gradients to shares.

The collectives are operators of torch.distributed, so that they are part of the captured program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True)
class Sharding:
    """Every parameter is divided along its first dimension over the ranks of `group`, each share as large as the first:
    the last ones are filled up with zeros."""

    group: dist.ProcessGroup
    rows: Mapping[str, int]
    """First dimension of every parameter, whole; of a stacked one, that of one layer's."""

    def share(self, rows: int) -> int:
        """So many of them does a rank have."""
        return -(-rows // self.group.size())

    def unshard(self, name: str, share: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The parameter called `name`, whole and in `dtype`, from all ranks' shares. Its gradient is this rank's share of
        the sum of all ranks' gradients, in the share's type."""
        return _Unshard.apply(share, dtype, self.rows[name], self.group)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Of all shares together, from that of this rank's."""
        total = COLLECTIVES.all_reduce(norm * norm, "sum", self.group.group_name)
        return COLLECTIVES.wait_tensor(total).sqrt()

    def gathered(self, name: str, shares: torch.Tensor) -> torch.Tensor:
        """All layers of a stack whole, [layers, rows, ...], from shares of each."""
        first = shares.movedim(1, 0).contiguous()
        whole = COLLECTIVES.all_gather_into_tensor(first, self.group.size(), self.group.group_name)
        return COLLECTIVES.wait_tensor(whole)[: self.rows[name]].movedim(0, 1)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shares, of `gathered`'s result."""
        share = self.share(whole.shape[1])
        own = whole[:, self.group.rank() * share :][:, :share]
        missing = own.new_zeros(len(own), share - own.shape[1], *own.shape[2:])
        return torch.cat([own, missing], 1)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, dtype, rows, group):
        ctx.dtype, ctx.rows, ctx.group = share.dtype, len(share), group
        ranks = group.size()
        # Narrowed first, so that what travels is narrow.
        whole = COLLECTIVES.all_gather_into_tensor(share.to(dtype).contiguous(), ranks, group.group_name)
        return COLLECTIVES.wait_tensor(whole)[:rows]

    @staticmethod
    def backward(ctx, gradient):
        ranks = ctx.group.size()
        missing = ctx.rows * ranks - len(gradient)
        gradient = torch.cat(
            [gradient.to(ctx.dtype), gradient.new_zeros(missing, *gradient.shape[1:], dtype=ctx.dtype)]
        )
        share = COLLECTIVES.reduce_scatter_tensor(gradient, "sum", ranks, ctx.group.group_name)
        return COLLECTIVES.wait_tensor(share), None, None, None
