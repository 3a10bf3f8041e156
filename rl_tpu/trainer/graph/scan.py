"""One loop in a program instead of the same operations again and again: over layers whose parameters are stacked.

Captured, a loop is a `torch.ops.higher_order.scan` node with the body as a graph of its own, which torch_tpu and XLA compile
once however often it runs. The gradient is a second loop, backwards, that computes each round's body again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

Body = Callable[..., torch.Tensor]
"""(carry, *one slice of every stacked tensor, *constants) -> next carry."""


def scan(
    body: Body, carry: torch.Tensor, stacked: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
) -> torch.Tensor:
    """carry = body(carry, *[tensor[i] for tensor in stacked], *constants) for every i; the last carry.

    carry      the same shape and type in every round
    stacked    [rounds, ...] each
    constants  without gradient
    Only to be called while a program is captured.
    """
    count = len(stacked)

    def forward(carry, *operands):
        return [body(carry, *operands), carry.clone()]

    def backward(gradient, carry, *operands):
        with torch.enable_grad():
            wanted = [tensor.detach().requires_grad_() for tensor in (carry, *operands[:count])]
            out = body(*wanted, *operands[count:])
        return list(torch.autograd.grad(out, wanted, gradient))

    # The loop's operator is dispatched below autograd, so the bodies become graphs here, above it.
    with disable_proxy_modes_tracing():
        operands = [torch.empty_like(tensor[0]) for tensor in stacked] + [torch.empty_like(c) for c in constants]
        ours, gradient = torch.empty_like(carry), torch.empty_like(carry)
        graphs = reenter_make_fx(forward)(ours, *operands), reenter_make_fx(backward)(gradient, ours, *operands)
    return _Scan.apply(*graphs, count, carry, *stacked, *constants)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, count, carry, *tensors):
        last, carries = scan_op(forward, [carry], list(tensors[:count]), tensors[count:])
        ctx.body, ctx.count = backward, count
        ctx.save_for_backward(carries, *tensors)
        return last

    @staticmethod
    def backward(ctx, gradient):
        carries, *tensors = ctx.saved_tensors
        stacked, constants = tensors[: ctx.count], tensors[ctx.count :]
        flipped = [tensor.flip(0) for tensor in (carries, *stacked)]
        into, *into_stacked = scan_op(ctx.body, [gradient], flipped, tuple(constants))
        return None, None, None, into, *(tensor.flip(0) for tensor in into_stacked), *[None] * len(constants)
