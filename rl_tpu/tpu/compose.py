"""A captured graph as a JAX function: what torch_tpu makes of its aten operations, joined by JAX's loops and kernels.

torch_tpu 0.2.0 lowers neither a loop nor a kernel without hardware. So a graph is cut at those: each piece between them is
lowered by torch_tpu to StableHLO, a loop becomes `jax.lax.scan` over its own composed body, and a kernel is called as the
JAX function that it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch.fx import Graph, GraphModule, Node

from rl_tpu.tpu.partition import jax_dtype
from rl_tpu.tpu.torch_tpu import stablehlo_primitive, to_stablehlo
from rl_tpu.trainer.graph.scan import backwards, forwards

LOOPS = {forwards: False, backwards: True}
"""Whether a loop begins with the last round."""

Arrays = list[Any]
Operators = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Piece:
    """Operations between two loops or kernels, as StableHLO from the nodes `inputs` to the nodes `outputs`."""

    text: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def compose(module: GraphModule, operators: Operators) -> Callable[..., Arrays]:
    """The JAX function that computes what `module` does, from arrays in its order to a list of arrays; `operators` are the
    JAX functions of this project's own operators, by name."""
    steps = [_lowered(module, step) if isinstance(step, list) else step for step in _steps(module)]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    bodies = {
        step: compose(getattr(module, step.args[0].target), operators)
        for step in steps
        if isinstance(step, Node) and step.target in LOOPS
    }

    def run(*arguments: Any) -> Arrays:
        values: dict[Node, Any] = dict(zip(placeholders, arguments, strict=True))
        for step in steps:
            if isinstance(step, Piece):
                results = _call(step, [values[node] for node in step.inputs])
                values.update(zip(step.outputs, results, strict=True))
            elif step.op == "get_attr":
                values[step] = getattr(module, step.target).numpy()
            elif step.target is operator.getitem:
                values[step] = values[step.args[0]][step.args[1]]
            elif step.target in LOOPS:
                operands = (_look_up(values, each) for each in step.args[1:])
                values[step] = _loop(bodies[step], *operands, reverse=LOOPS[step.target])
            else:
                values[step] = operators[step.target._schema.name](*_look_up(values, step.args))
        return [values[node] for node in output.args[0]]

    return run


def _look_up(values: dict[Node, Any], arguments: Any) -> Any:
    return torch.fx.map_arg(arguments, values.__getitem__)


def _loop(
    body: Callable[..., Arrays], carry: Sequence[Any], stacked: Sequence[Any], constants: Sequence[Any], reverse: bool
) -> tuple[Any, ...]:
    def step(carry, operands):
        results = body(*carry, *operands, *constants)
        return results[: len(carry)], results[len(carry) :]

    last, outputs = jax.lax.scan(step, list(carry), list(stacked), reverse=reverse)
    return *last, *outputs


def _call(piece: Piece, arguments: Sequence[Any]) -> Arrays:
    results = tuple((tuple(node.meta["val"].shape), jax_dtype(node.meta["val"].dtype)) for node in piece.outputs)
    return stablehlo_primitive().bind(*arguments, text=piece.text, name="torch_tpu", results=results)


def _steps(module: GraphModule) -> list[Node | list[Node]]:
    """The graph in order: loops, kernels and what selects from their results, and between them lists of other operations."""
    graph = module.graph
    for node in list(graph.nodes):  # what selects from several results stays beside what makes them
        if node.target is operator.getitem:
            node.args[0].append(node)
    steps: list[Node | list[Node]] = []
    special: set[Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or (node.op == "get_attr" and _is_body(module, node)):
            continue
        if _is_special(node) or (node.target is operator.getitem and node.args[0] in special):
            special.add(node)
            steps.append(node)
        elif steps and isinstance(steps[-1], list):
            steps[-1].append(node)
        else:
            steps.append([node])
    return steps


def _is_special(node: Node) -> bool:
    return node.op == "get_attr" or node.target in LOOPS or getattr(node.target, "namespace", "") == "rl_tpu"


def _is_body(module: GraphModule, node: Node) -> bool:
    return isinstance(getattr(module, node.target), GraphModule)


def _lowered(module: GraphModule, nodes: list[Node]) -> Piece:
    inside = set(nodes)
    inputs = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))
    outputs = [
        node
        for node in nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and any(user not in inside for user in node.users)
    ]
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    text = to_stablehlo(GraphModule(module, graph), [node.meta["val"] for node in inputs])
    return Piece(text, tuple(inputs), tuple(outputs))
