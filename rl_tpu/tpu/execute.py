"""A program on XLA's CPU devices: what a TPU would be given to compute, computed."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from rl_tpu.tpu.compose import compose
from rl_tpu.tpu.partition import Partition
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.programs import Program, Value


def shardings(values: tuple[Value, ...], layout: StackedLayout, partition: Partition) -> list[NamedSharding] | None:
    """How operands or results are divided; None on one device."""
    if partition.mesh is None:
        return None

    def spec(value: Value) -> PartitionSpec:
        if value.kind == "row":
            return PartitionSpec("data")
        if value.kind in ("buffer", "scalar") or not value.shape:
            return PartitionSpec()
        name = value.name.split("/")[0]
        return partition.parameter(name, value.shape, layout.is_stack(name))

    return [NamedSharding(partition.mesh, spec(value)) for value in values]


def jit(program: Program, layout: StackedLayout, partition: Partition):
    """The program as JAX compiles it: divided, and with the memory of what it replaces given away."""
    options = {}
    if partition.mesh is not None:
        options = {
            "in_shardings": shardings(program.operands, layout, partition),
            "out_shardings": shardings(program.results, layout, partition),
        }
    return jax.jit(compose(program.graph, partition), donate_argnums=program.replaced, **options)


def execute(
    program: Program, layout: StackedLayout, operands: Mapping[tuple[str, str], torch.Tensor], partition: Partition
) -> dict[tuple[str, str], torch.Tensor]:
    """Results by kind and name, from operands by kind and name."""
    with jax.enable_x64(True):
        arrays = [operands[value.kind, value.name].detach().cpu() for value in program.operands]
        results = jit(program, layout, partition)(*map(_to_jax, arrays))
        tensors = [torch.from_numpy(np.array(result, dtype=_numpy(result))) for result in results]
    return {
        (value.kind, value.name): tensor.to(value.dtype)
        for value, tensor in zip(program.results, tensors, strict=True)
    }


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy(), dtype="bfloat16")
    return jax.numpy.asarray(tensor.numpy())


def _numpy(array: jax.Array) -> np.dtype:
    return np.dtype("float32") if array.dtype == "bfloat16" else array.dtype
