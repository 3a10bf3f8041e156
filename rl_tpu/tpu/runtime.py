"""The kernels in a process that computes on a TPU: the operators of rl_tpu/trainer/kernels call the JAX functions.

torch_tpu traces a JAX function for the shapes that it is called with, and takes the result as one operation, eagerly as
well as in a graph of torch.compile(backend="tpu"), where the torch operator stays one node. Without a TPU torch_tpu 0.2.0
gets as far as the results' shapes: to make a program with such an operation in it, it needs the device. Programs that are
compiled without one are therefore put together in JAX (rl_tpu/tpu/compose.py). Not yet run on hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import torch

from rl_tpu.tpu.kernels import KERNELS
from rl_tpu.trainer.kernels import fused_logprobs, grouped_matmul, splash_attention  # noqa: F401  (defines the operators)

NAMESPACE = "rl_tpu_jax"
"""Of the operators that torch_tpu makes: rl_tpu_jax::NAME computes rl_tpu::NAME, whose gradients and fake results stay."""


@cache
def register_kernels() -> None:
    """Gives every operator of KERNELS its implementation on torch's `tpu` device. torch_tpu must have been loaded."""
    # Tracing may ask JAX for a device (megablox does), and JAX would then open the chip that torch_tpu has open.
    jax.config.update("jax_platforms", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax_op is experimental
        for name, kernel in KERNELS.items():
            operator = torch.tpu.pallas.jax_op(f"{NAMESPACE}::{name.split('::')[1]}", kernel.function)
            torch.library.register_kernel(name, "tpu", _with_narrow_integers(operator))


def _with_narrow_integers(operator: Callable[..., Any]) -> Callable[..., Any]:
    """JAX has no int64 by default: torch_tpu refuses tensors of it for the int32 that JAX makes of them."""

    def call(*arguments: Any) -> Any:
        return operator(*map(_narrow, arguments))

    return call


def _narrow(argument: Any) -> Any:
    return argument.int() if isinstance(argument, torch.Tensor) and argument.dtype == torch.int64 else argument
