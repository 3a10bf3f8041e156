"""From this rank's share of a parameter to the parameter that the forward computes with, as an operator.

One rank has all of it, so that only its type changes. In a program for several devices this operator is the place where
shares are gathered, and its gradient the place where gradients are reduced to shares.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("rl_tpu::unshard", mutates_args=())
def unshard(share: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The parameter called `name`, in `dtype`. Its gradient is in the share's type."""
    return share.to(dtype, copy=True)


@unshard.register_fake
def _(share, name, dtype):
    return torch.empty_like(share, dtype=dtype)


@torch.library.custom_op("rl_tpu::reshard", mutates_args=())
def reshard(gradient: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """This rank's share of the sum of all gradients, in `dtype`."""
    return gradient.to(dtype, copy=True)


@reshard.register_fake
def _(gradient, name, dtype):
    return torch.empty_like(gradient, dtype=dtype)


@torch.library.custom_op("rl_tpu::accumulate", mutates_args=())
def accumulate(total: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """total + share, of gradients that are divided alike."""
    return total + share


@accumulate.register_fake
def _(total, share):
    return torch.empty_like(total)


def _keep(ctx, inputs, output):
    share, ctx.name, _ = inputs
    ctx.dtype = share.dtype


unshard.register_autograd(
    lambda ctx, gradient: (reshard(gradient, ctx.name, ctx.dtype), None, None), setup_context=_keep
)
