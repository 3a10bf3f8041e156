"""A program on XLA's CPU devices: what a TPU would be given to compute, computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
import torch
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


def execute(
    program: Program, layout: StackedLayout, operands: Mapping[tuple[str, str], torch.Tensor], partition: Partition
) -> dict[tuple[str, str], torch.Tensor]:
    """Results by kind and name, from operands by kind and name. Rows are those of all devices."""
    with jax.enable_x64(True):
        arrays = [operands[value.kind, value.name].detach().cpu() for value in program.operands]
        results = jit(program, layout, partition)(*map(_to_jax, arrays))
        tensors = [torch.from_numpy(np.array(result, dtype=_numpy(result))) for result in results]
    return {
        (value.kind, value.name): tensor.to(value.dtype) for value, tensor in zip(program.results, tensors, strict=True)
    }


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy(), dtype="bfloat16")
    return jax.numpy.asarray(tensor.numpy())


def _numpy(array: jax.Array) -> np.dtype:
    return np.dtype("float32") if array.dtype == "bfloat16" else array.dtype
