"""A function of tensors as one graph of aten operations, loops and kernels, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

_CHECKS = {torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default}


def capture(function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor]) -> GraphModule:
    """What `function` does to tensors like `examples` (only their shapes and types matter), gradients that it asks
    torch.autograd for included. The graph takes the tensors in that order, changes none of them and returns a list.

    Operations that write into their operands become ones that do not; attention becomes matrix products and a softmax;
    assertions about values are left out.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, sdpa_kernel(SDPBackend.MATH):
        fakes = [fake_like(mode, example) for example in examples]
        graph = make_fx(function)(*fakes)
        with torch.no_grad():
            pure = make_fx(torch.func.functionalize(graph, remove="mutations"))(*fakes)
    for module in pure.modules():
        if isinstance(module, GraphModule):
            _clean(module)
    return pure


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _as_view(operation: OpOverload) -> OpOverload:
    """Within loops, views come out as copies. Where nothing is written into, a view does the same."""
    name = operation.overloadpacket.__name__
    if not name.endswith("_copy") or not hasattr(torch.ops.aten, name.removesuffix("_copy")):
        return operation
    return getattr(getattr(torch.ops.aten, name.removesuffix("_copy")), operation._overloadname)


def _clean(module: GraphModule) -> None:
    graph = module.graph
    for node in graph.nodes:
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            node.target = _as_view(node.target)
    graph.eliminate_dead_code()
    module.recompile()
