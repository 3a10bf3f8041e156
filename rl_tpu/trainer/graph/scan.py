"""One loop in a program instead of the same operations again and again: over layers whose parameters are stacked.

In a captured graph a loop is a call of `forwards` or `backwards` with the body as a graph of its own, so that a compiler sees
the body once however often it runs. The gradient is a second loop, the other way round, that computes each round's body
again.
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


def forwards(
    body: Callable[..., Sequence[torch.Tensor]],
    carry: Sequence[torch.Tensor],
    stacked: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """What torch.ops.higher_order.scan computes: body(*carry, *[tensor[i] for tensor in stacked], *constants) gives the next
    carry and what to stack, for every i. Returns the last carry and the stacks, [rounds, ...] each."""
    if torch.compiler.is_dynamo_compiling():  # which would write out every round
        return tuple(scan_op(body, list(carry), list(stacked), tuple(constants)))
    return _loop(body, carry, stacked, constants, range(len(stacked[0])))


def backwards(
    body: Callable[..., Sequence[torch.Tensor]],
    carry: Sequence[torch.Tensor],
    stacked: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """As `forwards`, from the last round to the first."""
    if torch.compiler.is_dynamo_compiling():
        results = forwards(body, carry, [tensor.flip(0) for tensor in stacked], constants)
        return *results[: len(carry)], *(stack.flip(0) for stack in results[len(carry) :])
    return _loop(body, carry, stacked, constants, range(len(stacked[0]) - 1, -1, -1))


def _loop(body, carry, stacked, constants, order: range) -> tuple[torch.Tensor, ...]:
    stacks: list[torch.Tensor] = []
    for index in order:
        results = body(*carry, *(tensor[index] for tensor in stacked), *constants)
        carry, found = results[: len(carry)], results[len(carry) :]
        stacks = stacks or [result.new_empty(len(order), *result.shape) for result in found]
        for stack, result in zip(stacks, found, strict=True):
            stack[index] = result
    return *carry, *stacks


def as_calls(graph: torch.fx.Graph) -> None:
    """Replace torch's scan operators by `forwards` and `backwards`. torch's has no direction: whoever goes backwards flips
    what goes in and what comes out, which copies it all."""
    for node in [node for node in graph.nodes if node.target is scan_op]:
        body, carry, stacked, constants = node.args
        stacks = [user for user in node.users if user.args[1] >= len(carry)]
        around = [*stacked, *(flip for stack in stacks for flip in stack.users)]
        reverse = all(each.target is torch.ops.aten.flip.default for each in around)
        if reverse:
            node.args = (body, carry, [each.args[0] for each in stacked], constants)
            for stack in stacks:
                for flip in list(stack.users):
                    flip.replace_all_uses_with(stack)
        node.target = backwards if reverse else forwards


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
