"""A program as JAX compiles it, for one device or divided over several."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rl_tpu.tpu.compose import compose
from rl_tpu.tpu.partition import Partition
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.programs import Program, Value


def jit(program: Program, layout: StackedLayout, partition: Partition):
    """The program as JAX compiles it: divided, and with the memory of what it replaces given away.

    The update, which has no rows, is divided by XLA's partitioner as its operands are.
    """
    if partition.mesh is None:
        return jax.jit(compose(program.graph, partition.operators({})), donate_argnums=program.replaced)
    specs = [_spec(value, layout, partition) for value in program.operands]
    results = [_spec(value, layout, partition) for value in program.results]
    shares = {
        value.name: PartitionSpec(*spec[layout.is_stack(value.name) :])
        for value, spec in zip(program.operands, specs, strict=True)
        if value.kind == "parameter"
    }
    function = compose(program.graph, partition.operators(shares))
    if any(value.kind == "row" for value in program.operands):
        function = partition.over_rows(_with_statistics(function, program, partition), specs, results)
    in_shardings, out_shardings = ([NamedSharding(partition.mesh, spec) for spec in each] for each in (specs, results))
    return jax.jit(
        function, donate_argnums=program.replaced, in_shardings=tuple(in_shardings), out_shardings=out_shardings
    )


def _spec(value: Value, layout: StackedLayout, partition: Partition) -> PartitionSpec:
    if value.kind == "row":
        return PartitionSpec("data")
    if value.kind in ("buffer", "scalar") or not value.shape:
        return PartitionSpec()
    name = value.name.split("/")[0]
    return partition.parameter(name, value.shape, layout.is_stack(name))


def _with_statistics(function: Callable[..., list], program: Program, partition: Partition) -> Callable[..., list]:
    def run(*operands: jax.Array) -> list[jax.Array]:
        results = zip(program.results, function(*operands), strict=True)
        return [partition.reduced(each.name, value) if each.kind == "scalar" else value for each, value in results]

    return run
