"""A function of tensors as one graph of aten operations, loops and kernels, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_tpu.trainer.graph.scan import as_calls

_CHECKS = {torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default}
_ALIASES = [torch.ops.aten.detach, torch.ops.aten.detach_copy, torch.ops.aten.alias, torch.ops.aten.alias_copy]
_NOTHING = {packet.default for packet in _ALIASES}
"""What these return is what they were given, where nothing is written into and no gradient is asked for any more."""


def capture(
    function: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    device: torch.device | str = "cpu",
) -> GraphModule:
    """What `function` does to tensors like `examples` (only their shapes and types matter) on `device`, gradients that it
    asks torch.autograd for included. The graph takes the tensors in that order, changes none of them and returns a list.

    Operations that write into their operands become ones that do not; attention becomes matrix products and a softmax;
    assertions about values, and marks for profilers, are left out.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, sdpa_kernel(SDPBackend.MATH):
        fakes = [_fake_like(mode, example, device) for example in examples]
        graph = make_fx(function)(*fakes)
        with torch.no_grad():
            pure = make_fx(torch.func.functionalize(graph, remove="mutations"))(*fakes)
    for module in pure.modules():
        if isinstance(module, GraphModule):
            _clean(module)
    return pure


def _fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _as_view(operation: OpOverload) -> OpOverload:
    """Within loops, views come out as copies. Where nothing is written into, a view does the same."""
    name = operation.overloadpacket.__name__
    if not name.endswith("_copy") or not hasattr(torch.ops.aten, name.removesuffix("_copy")):
        return operation
    return getattr(getattr(torch.ops.aten, name.removesuffix("_copy")), operation._overloadname)


def _clean(module: GraphModule) -> None:
    graph = module.graph
    for node in reversed(graph.nodes):
        if node.target in _CHECKS or getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)
    for node in graph.nodes:
        if node.target in _NOTHING:
            node.replace_all_uses_with(node.args[0])
        elif isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            node.target = _as_view(node.target)
    as_calls(graph)
    graph.eliminate_dead_code()
    module.recompile()
