"""A program on XLA's CPU devices: what a TPU would be given to compute, computed."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import torch

from rl_tpu.tpu.jit import jit
from rl_tpu.tpu.partition import Partition
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.programs import Program


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
