"""How a program is divided over devices, which form a mesh of axes `data` and `tensor`.

Along `data` as FSDP does: a device has its rows and its share of every parameter, gradient and moment, gathers a parameter
where the program says `rl_tpu::unshard`, and sums gradients to shares at `rl_tpu::reshard`. A program is then one device's,
captured with that device's rows (`manual`), and these two are collectives.

With matrices divided along `tensor` it is captured with all rows, the two are annotations, and XLA's partitioner makes the
collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    @property
    def manual(self) -> bool:
        """A program over rows is one device's, not all devices'."""
        return self.mesh is not None and self.mesh.shape["tensor"] == 1

    def rows(self, per_share: int) -> int:
        """Rows that a program is captured with where every share of `data` has so many."""
        return per_share * (1 if self.mesh is None or self.manual else self.mesh.shape["data"])

    def operators(self, specs: Mapping[str, PartitionSpec]) -> dict[str, Callable[..., Any]]:
        """The JAX functions of this project's torch operators, by the operators' names.

        specs: of every parameter, of a stack's without the dimension that counts layers.
        """

        def unshard(share: jax.Array, name: str, dtype: Any) -> jax.Array:
            share = share.astype(jax_dtype(dtype))  # narrowed first, so that what travels is narrow
            return self._gathered(share, specs.get(name, PartitionSpec()))

        def reshard(gradient: jax.Array, name: str, dtype: Any) -> jax.Array:
            return self._summed(gradient.astype(jax_dtype(dtype)), specs.get(name, PartitionSpec()))

        kernels = {name: self._kernel(kernel) for name, kernel in KERNELS.items()}
        own = {"rl_tpu::unshard": unshard, "rl_tpu::reshard": reshard, "rl_tpu::accumulate": jax.numpy.add}
        return kernels | own

    def _gathered(self, share: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh is None:
            return share
        if not self.manual:
            kept = PartitionSpec(*("tensor" if "tensor" in (axes or ()) else None for axes in spec))
            return self._laid_out(self._laid_out(share, spec), kept)
        dimension = _data_dimension(spec)
        return share if dimension is None else jax.lax.all_gather(share, "data", axis=dimension, tiled=True)

    def _summed(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh is None:
            return gradient
        if not self.manual:
            return self._laid_out(gradient, spec)
        dimension = _data_dimension(spec)
        if dimension is None:
            return jax.lax.psum(gradient, "data")
        return jax.lax.psum_scatter(gradient, "data", scatter_dimension=dimension, tiled=True)

    def _laid_out(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def _kernel(self, kernel: Kernel) -> Callable[..., Any]:
        """XLA cannot divide a kernel: each device calls it on what it has of the operands."""
        if self.mesh is None or self.manual:
            return partial(kernel.function, interpret=self.interpret)

        def divided(*operands: Any) -> Any:
            arrays = [operand for operand in operands if hasattr(operand, "shape")]

            def each(*parts: jax.Array) -> Any:
                results = kernel.function(*parts, *operands[len(arrays) :], interpret=self.interpret)
                if not kernel.reduced:
                    return results
                sums = ((jax.lax.psum(part, "data") if i in kernel.reduced else part) for i, part in enumerate(results))
                return tuple(sums)

            return jax.shard_map(
                each, mesh=self.mesh, in_specs=kernel.inputs, out_specs=kernel.outputs, check_vma=False
            )(*arrays)

        return divided

    def over_rows(
        self, function: Callable[..., Any], operands: Sequence[PartitionSpec], results: Sequence[PartitionSpec]
    ):
        """A program over rows, as a function of all devices' operands to all devices' results."""
        if not self.manual:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(operands),
            out_specs=list(results),
            check_vma=False,
        )

    def reduced(self, name: str, value: jax.Array) -> jax.Array:
        """A statistic over all rows from one over a share of them, by Tally's name for it."""
        if not self.manual:
            return value
        return (jax.lax.pmax if name.startswith("maximum/") else jax.lax.psum)(value, "data")


def _data_dimension(spec: PartitionSpec) -> int | None:
    """Which dimension is divided over `data`."""
    return next((place for place, axes in enumerate(spec) if "data" in (axes or ())), None)


def jax_dtype(dtype: Any) -> np.dtype:
    """JAX's name of a torch type."""
    return jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))
