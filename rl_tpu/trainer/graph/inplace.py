"""A program as one rank runs it: what it replaces is written where it was."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node

from rl_tpu.trainer.graph.programs import Program, Value

ATEN = torch.ops.aten
_CAST = {torch.ops.rl_tpu.unshard.default, torch.ops.rl_tpu.reshard.default}
_ACCUMULATE = torch.ops.rl_tpu.accumulate.default


def in_place(program: Program) -> tuple[GraphModule, tuple[Value, ...]]:
    """A graph of the same operands that writes into those which the program replaces, and returns the other results."""
    module = _with_plain_operators(program.graph)
    nodes = module.graph
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    memory = {(value.kind, value.name): node for value, node in zip(program.operands, placeholders, strict=True)}
    output = next(node for node in reversed(nodes.nodes) if node.op == "output")
    left: list[tuple[Value, Node]] = []
    with nodes.inserting_before(output):
        for value, node in zip(program.results, output.args[0], strict=True):
            into = memory.get((value.kind, value.name))
            if into is None:
                left.append((value, node))
            elif node.target is _ACCUMULATE and node.args[0] is into:
                nodes.call_function(ATEN.add_.Tensor, node.args[:2])
            else:
                nodes.call_function(ATEN.copy_.default, (into, node))
    output.args = ([node for _, node in left],)
    nodes.eliminate_dead_code()
    module.recompile()
    return module, tuple(value for value, _ in left)


def _with_plain_operators(module: GraphModule) -> GraphModule:
    """A copy of it, loops included. Where a rank has whole parameters, gathering one is a cast."""
    new = GraphModule(module, copy.deepcopy(module.graph))
    for node in new.graph.nodes:
        if node.op == "get_attr" and isinstance(body := getattr(new, node.target), GraphModule):
            setattr(new, node.target, _with_plain_operators(body))
        elif node.target in _CAST:
            node.target, node.args = ATEN.to.dtype, (node.args[0], node.args[2])
    new.recompile()
    return new
