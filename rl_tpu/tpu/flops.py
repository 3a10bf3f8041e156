"""Useful floating-point operations of a captured program, from the shapes in its graph.

XLA's own count takes the body of a loop once, however often it runs, and knows nothing of kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from rl_tpu.tpu.kernels import KERNELS
from rl_tpu.trainer.graph.scan import backwards, forwards


def count_flops(graph: GraphModule) -> float:
    """Floating-point operations of all matrix products in `graph`, every round of its loops and what it computes again
    included: those of plain operators by torch's table, those of kernels by their own account. Operations on single numbers
    (softmax, norms, the optimizer) are not counted, as in torch.utils.flop_counter."""
    return float(sum(_flops(graph, node) for node in graph.graph.nodes if node.op == "call_function"))


def _flops(graph: GraphModule, node: Node) -> float:
    if node.target in (forwards, backwards):
        body, _, stacked, _ = node.args
        return len(stacked[0].meta["val"]) * count_flops(getattr(graph, body.target))
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    arguments = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
    if kernel := KERNELS.get(node.target._schema.name):
        return kernel.flops(*arguments)
    formula: Any = flop_registry.get(node.target.overloadpacket)
    return formula(*arguments, **node.kwargs, out_val=node.meta["val"]) if formula else 0.0
