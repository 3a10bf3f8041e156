"""Splash attention inside the segments of packed rows: JAX's Pallas kernels behind rl_tpu::splash_attention.

JAX's public entry hides the normaliser that the backward needs, so this file calls the private forward and backward of
jax.experimental.pallas.ops.tpu.splash_attention as they are in jax 0.10.2. All rows go in as one long row whose segments
have names of their own. Which tiles are computed at all is found from the segment ids when the program runs: a tile whose
queries and keys share no segment is skipped, so that packed short samples cost the sum of their squares.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import PartitionSpec

from rl_tpu.errors import UserError
from rl_tpu.tpu.kernels.base import Kernel

LANES = 128
"""Width of a TPU's vector registers: tiles are multiples of it."""


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scale: float,
    block_q: int,
    block_kv: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As the operator: [R, L, H, d], [R, L, K, d] twice and [R, L] -> [R, L, H, d] and [R, L, H] float32."""
    with jax.enable_x64(False):  # the kernels count in int32, whatever the program around them does
        rows, length, *_ = q.shape
        blocks = _blocks(length, block_q, block_kv)
        names, by_query, _ = _tiles(segment_ids, blocks)
        out, (logsumexp,) = splash._splash_attention_forward(
            by_query,
            _scaled(q, scale),
            _one_row(k),
            _one_row(v),
            names,
            sinks=None,
            mask_value=splash.DEFAULT_MASK_VALUE,
            is_mqa=False,
            block_sizes=blocks,
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=_up_to_itself,
            interpret=interpret,
        )
        return _packed(out, rows), logsumexp.T.reshape(rows, length, -1)


def splash_attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    segment_ids: jax.Array,
    scale: float,
    block_q: int,
    block_kv: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from the forward's results, without another forward.

    Two kernels, one for dq and one for dk and dv. JAX also has one for all three (five products of matrices instead of
    seven), which holds a dq for every tile of keys: memory that grows with the square of the row.
    """
    with jax.enable_x64(False):
        rows, length, *_ = q.shape
        blocks = _blocks(length, block_q, block_kv)
        names, by_query, by_key = _tiles(segment_ids, blocks)
        residuals = (
            _scaled(q, scale),
            _one_row(k),
            _one_row(v),
            names,
            None,
            _one_row(out),
            logsumexp.reshape(rows * length, -1).T,
            by_query,
            by_key,
        )
        *_, dq, dk, dv, _, _ = splash._splash_attention_bwd(
            False,
            splash.DEFAULT_MASK_VALUE,
            False,
            blocks,
            None,
            _up_to_itself,
            None,
            interpret,
            residuals,
            _one_row(grad),
        )
        return _packed(_times(dq, scale), rows), _packed(dk, rows), _packed(dv, rows)


def tile(length: int, block: int) -> int:
    """The longest tile of a row of `length` tokens that is no longer than `block`: a multiple of 128 that divides it."""
    if length % LANES:
        raise UserError(
            f"trainer.row_tokens: {length} is not a multiple of {LANES}, which the tiles of trainer.kernels.attention=splash"
            " (attention_block_q, attention_block_kv) must be"
        )
    return max((size for size in range(LANES, min(block, length) + 1, LANES) if length % size == 0), default=LANES)


def _blocks(length: int, block_q: int, block_kv: int) -> splash.BlockSizes:
    q, kv = tile(length, block_q), tile(length, block_kv)
    return splash.BlockSizes(block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)


def _up_to_itself(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return queries >= keys


def _tiles(segment_ids: jax.Array, blocks: splash.BlockSizes) -> tuple[splash.SegmentIds, MaskInfo, MaskInfo]:
    """Names of all rows' segments [R * L], and the tiles that hold pairs which see each other: for every tile of queries
    the tiles of keys, and for every tile of keys the tiles of queries.

    The kernels step over as many tiles as a row has and are told which one to load at each step. Where there is nothing
    to compute it is the one that is loaded already, or the first that will be needed: nothing is moved.
    """
    rows, length = segment_ids.shape
    ids = segment_ids.astype(jnp.int32)
    # Padding comes last in its row; with the greatest name a tile's names stay one short interval.
    names = jnp.where(ids > 0, ids - 1, length) + jnp.arange(rows, dtype=jnp.int32)[:, None] * (length + 1)
    queries, keys = (names.reshape(rows, -1, size) for size in (blocks.block_q, blocks.block_kv))
    meet = (queries.min(2)[:, :, None] <= keys.max(2)[:, None]) & (keys.min(2)[:, None] <= queries.max(2)[:, :, None])
    first_key = jnp.arange(keys.shape[1]) * blocks.block_kv
    last_query = jnp.arange(1, queries.shape[1] + 1) * blocks.block_q - 1
    meet &= last_query[:, None] >= first_key  # [R, tiles of queries, tiles of keys]
    places = jnp.arange(rows * length, dtype=jnp.int32)
    by_query = _schedule(meet, 2).reshape(1, -1, meet.shape[2]), meet.reshape(1, -1, meet.shape[2])
    by_key = (array.swapaxes(0, 1).reshape(1, meet.shape[1], -1) for array in (_schedule(meet, 1), meet))
    infos = [
        MaskInfo(
            data_next=load,
            mask_next=None,
            block_mask=compute.astype(jnp.int8),
            partial_mask_blocks=None,
            q_sequence=places,
        )
        for load, compute in (by_query, by_key)
    ]
    names = names.reshape(-1)
    return splash.SegmentIds(names, names), *infos


def _schedule(meet: jax.Array, axis: int) -> jax.Array:
    """[R, ...] which tiles along `axis` are computed -> the tile to hold at each step, counted through all rows."""
    count = meet.shape[axis]
    first = jnp.argmax(meet, axis, keepdims=True)
    last = count - 1 - jnp.argmax(jnp.flip(meet, axis), axis, keepdims=True)
    steps = jax.lax.broadcasted_iota(jnp.int32, meet.shape, axis)
    row = jax.lax.broadcasted_iota(jnp.int32, meet.shape, 0)
    return (jnp.clip(steps, first, last) + row * count).astype(jnp.int32)


def _one_row(tensor: jax.Array) -> jax.Array:
    """[R, L, heads, d] -> [heads, R * L, d]."""
    return tensor.reshape(-1, *tensor.shape[2:]).swapaxes(0, 1)


def _packed(tensor: jax.Array, rows: int) -> jax.Array:
    return tensor.swapaxes(0, 1).reshape(rows, -1, tensor.shape[0], tensor.shape[2])


def _times(tensor: jax.Array, scale: float) -> jax.Array:
    return (tensor.astype(jnp.float32) * scale).astype(tensor.dtype)


def _scaled(q: jax.Array, scale: float) -> jax.Array:
    """The kernels know no scale: queries carry it, rounded to their type."""
    return _one_row(_times(q, scale))


def _flops(products: int, q: jax.Array) -> float:
    """Of so many products of matrices for a row that is one segment; half of all pairs see each other."""
    rows, length, heads, dim = q.shape
    return products * rows * heads * dim * float(length) ** 2


_HEADS, _ROWS = PartitionSpec("data", None, "tensor", None), PartitionSpec("data", None)
_NORMALIZER = PartitionSpec("data", None, "tensor")

SPLASH_ATTENTION = Kernel(
    function=splash_attention,
    inputs=(_HEADS, _HEADS, _HEADS, _ROWS),
    outputs=(_HEADS, _NORMALIZER),
    flops=lambda q, *_: _flops(2, q),
)

SPLASH_ATTENTION_BACKWARD = Kernel(
    function=splash_attention_backward,
    inputs=(_HEADS, _HEADS, _HEADS, _HEADS, _HEADS, _NORMALIZER, _ROWS),
    outputs=(_HEADS, _HEADS, _HEADS),
    flops=lambda grad, q, *_: _flops(5, q),  # the useful five, not the seven that the two kernels compute
)
