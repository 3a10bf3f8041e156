"""Products of groups of rows with a matrix each: JAX's Pallas kernels (megablox) behind rl_tpu::grouped_matmul."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.sharding import PartitionSpec

from rl_tpu.tpu.kernels.base import Kernel

SUBLANES = 16
"""Rows of a tile of 16-bit numbers: row tiles are multiples of it."""


def grouped_matmul(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    block_rows: int,
    block_inner: int,
    block_columns: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """As the operator: [T, K], [E, N, K] and [E] -> [T, N]."""
    with jax.enable_x64(False):  # the kernels count in int32, whatever the program around them does
        sizes = group_sizes.astype(jnp.int32)
        tiles = block_rows, block_inner, block_columns
        return _product(left, right, sizes, tiles, transpose=True, interpret=interpret)


def grouped_matmul_backward(
    grad: jax.Array,
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    block_rows: int,
    block_inner: int,
    block_columns: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of left and right."""
    with jax.enable_x64(False):
        sizes = group_sizes.astype(jnp.int32)
        tiles = block_rows, block_inner, block_columns
        of_left = _product(grad, right, sizes, tiles, transpose=False, interpret=interpret)
        rows, *sides = _fitting(tiles, len(left), grad.shape[1], left.shape[1])
        of_right = tgmm(
            _filled(grad, rows).T, _filled(left, rows), sizes, right.dtype, (rows, *sides), interpret=interpret
        )
        return of_left, of_right


def _product(left, right, sizes, tiles, *, transpose: bool, interpret: bool) -> jax.Array:
    """left times every group's matrix, or its transpose. The kernel leaves rows of no group as they were in memory."""
    inner, columns = right.shape[:0:-1] if transpose else right.shape[1:]
    rows, *sides = _fitting(tiles, len(left), inner, columns)
    found = gmm(
        _filled(left, rows), right, sizes, left.dtype, (rows, *sides), transpose_rhs=transpose, interpret=interpret
    )[: len(left)]
    return jnp.where(jnp.arange(len(left))[:, None] < sizes.sum(), found, 0)


def _fitting(tiles: tuple[int, int, int], rows: int, *sides: int) -> tuple[int, ...]:
    """No tile is longer than what it divides, rows filled up to whole vectors."""
    return min(tiles[0], -(-rows // SUBLANES) * SUBLANES), *(
        min(tile, side) for tile, side in zip(tiles[1:], sides, strict=False)
    )


def _filled(tensor: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(tensor, ((0, -len(tensor) % multiple), (0, 0)))


def _flops(left: jax.Array, right: jax.Array) -> float:
    """Of one product with all rows in groups."""
    return 2.0 * left.shape[0] * right.shape[1] * right.shape[2]


_ROWS, _MATRICES = PartitionSpec("data", None), PartitionSpec(None, None, None)
_GROUPS = PartitionSpec("data")  # every share of the rows has groups of its own

GROUPED_MATMUL = Kernel(
    function=grouped_matmul,
    inputs=(_ROWS, _MATRICES, _GROUPS),
    outputs=_ROWS,
    flops=lambda left, right, *_: _flops(left, right),
)

GROUPED_MATMUL_BACKWARD = Kernel(
    function=grouped_matmul_backward,
    inputs=(_ROWS, _ROWS, _MATRICES, _GROUPS),
    outputs=(_ROWS, _MATRICES),
    reduced=(1,),
    flops=lambda grad, left, right, *_: 2 * _flops(left, right),
)
