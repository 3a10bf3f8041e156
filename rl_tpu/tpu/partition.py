"""How a program is divided over devices: by annotations, from which XLA's partitioner makes the collectives.

Devices form a mesh of axes `data` and `tensor`. Parameters, gradients and moments are divided over both, as FSDP and tensor
parallelism do; rows over `data`. Where a program gathers a parameter (`rl_tpu::unshard`) it is whole over `data` from there
on, and its gradient is divided again at `rl_tpu::reshard`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_tpu.tpu.kernels import KERNELS
from rl_tpu.tpu.kernels.base import Kernel

TENSOR_DIMENSION = {r"(wq|wk|wv|w1|w3)\.weight": 0, r"(wo|w2)\.weight": 1, r"(tok_embeddings|lm_head)\.weight": 0}
"""Dimension of a matrix that tensor parallelism divides, by the end of its name: columns of what goes into a block's heads
and units (the rows of torch's weights), rows of what comes out of them, and the vocabulary."""


@dataclass(frozen=True)
class Partition:
    """Programs divided over `mesh`; None: on one device.

    interpret: kernels are computed by JAX's interpreter, for devices that are no TPUs.
    """

    mesh: Mesh | None = None
    interpret: bool = False

    @classmethod
    def over(cls, devices: Sequence[Any], tensor: int = 1, interpret: bool = False) -> Partition:
        """Over these devices, so many of which share every matrix."""
        return cls(Mesh(np.array(devices).reshape(-1, tensor), ("data", "tensor")), interpret)

    def parameter(self, name: str, shape: Sequence[int], stacked: bool = False) -> PartitionSpec:
        """Of a parameter, its gradient or its moment: the first dimension that divides is divided over `data`."""
        own = list(shape[1:] if stacked else shape)
        axes: list[tuple[str, ...]] = [() for _ in own]
        sizes = dict(self.mesh.shape)
        dimension = next((place for end, place in TENSOR_DIMENSION.items() if re.search(end + "$", name)), None)
        if dimension is not None and sizes["tensor"] > 1 and own[dimension] % sizes["tensor"] == 0:
            axes[dimension] = ("tensor",)
        for place, size in enumerate(own):
            ways = sizes["data"] * (sizes["tensor"] if axes[place] else 1)
            if sizes["data"] > 1 and size % ways == 0:
                axes[place] = (*axes[place], "data")
                break
        return PartitionSpec(*([None] if stacked else []), *(each or None for each in axes))

    def operators(self) -> dict[str, Callable[..., Any]]:
        """The JAX functions of this project's torch operators, by the operators' names."""
        kernels = {name: self._divided(kernel) for name, kernel in KERNELS.items()}
        return kernels | {"rl_tpu::unshard": self._unshard, "rl_tpu::reshard": self._reshard}

    def _unshard(self, share: jax.Array, name: str, dtype: Any) -> jax.Array:
        whole = share.astype(jax_dtype(dtype))
        if self.mesh is None:
            return whole
        spec = self.parameter(name, whole.shape)
        kept = PartitionSpec(*("tensor" if axes and "tensor" in axes else None for axes in spec))
        # Divided in the narrower type first, so that what travels is in that.
        return self._laid_out(self._laid_out(whole, spec), kept)

    def _reshard(self, gradient: jax.Array, name: str, dtype: Any) -> jax.Array:
        share = gradient.astype(jax_dtype(dtype))
        return share if self.mesh is None else self._laid_out(share, self.parameter(name, share.shape))

    def _laid_out(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def _divided(self, kernel: Kernel) -> Callable[..., Any]:
        """The kernel on every device's part of its operands: XLA cannot divide a kernel itself."""

        def call(*operands: Any) -> Any:
            arrays = [operand for operand in operands if hasattr(operand, "shape")]
            numbers = operands[len(arrays) :]

            def each(*parts: jax.Array) -> Any:
                results = kernel.function(*parts, *numbers, interpret=self.interpret)
                if not kernel.reduced:
                    return results
                return tuple(
                    jax.lax.psum(result, "data") if index in kernel.reduced else result
                    for index, result in enumerate(results)
                )

            if self.mesh is None:
                return kernel.function(*operands, interpret=self.interpret)
            divided = jax.shard_map(
                each, mesh=self.mesh, in_specs=kernel.inputs, out_specs=kernel.outputs, check_vma=False
            )
            return divided(*arrays)

        return call


def jax_dtype(dtype: Any) -> np.dtype:
    """JAX's name of a torch type."""
    return jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))
