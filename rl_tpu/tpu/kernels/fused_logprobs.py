"""Output layer, softmax, log-probabilities and entropies in Pallas kernels: no logit ever leaves a TPU's vector memory.

A tile of logits is the product of a block of tokens and a block of the output layer's rows over the whole hidden size. The
forward goes through the vocabulary for each block of tokens and keeps per token the running maximum, two sums and the
label's logit (the online softmax of Milakov and Gimelshein, 2018, with the sum that the entropy needs beside it). The
backward computes every tile again, once for the gradient of the hidden states and once for that of the weight, because
each of the two is a sum over the other's outer loop.

A tile is [vocabulary, tokens] or [tokens, vocabulary] as the product after it wants it; what is known per token comes as
rows or as columns accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from rl_tpu.errors import UserError
from rl_tpu.tpu.kernels.base import Kernel

NEVER = -1e30
"""A logit of probability 0. Finite, so that it times that probability is 0 as well."""
VMEM_BYTES = 60 << 20
"""What a kernel may take of a core's vector memory: TPU7x and v5p have 64 MiB, v5e and v6e twice that."""
LANES = 128
"""A tile's sides are multiples of it."""


def fused_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    temperature: float,
    block_tokens: int,
    block_vocabulary: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the operator rl_tpu::fused_logprobs: hidden [N, D], weight [V, D], labels [N] -> log-probabilities, entropies
    and normalizers (logsumexp of the logits), each [N] float32. N and V need not be multiples of the blocks.

    Raises UserError where the tiles do not fit the TPU."""
    tiles = _tiles(hidden, weight, block_tokens, block_vocabulary, interpret)
    row = pl.BlockSpec((1, tiles.block_tokens), lambda t, v: (0, t))
    with jax.enable_x64(False):
        found = pl.pallas_call(
            functools.partial(_forward, tiles, temperature),
            **tiles.options("fused_logprobs", interpret, 1, tiles.tokens + tiles.token_blocks * tiles.vocabulary),
            grid=(tiles.token_blocks, tiles.vocabulary_blocks),
            in_specs=[
                pl.BlockSpec((tiles.block_tokens, tiles.width), lambda t, v: (t, 0)),
                pl.BlockSpec((tiles.block_vocabulary, tiles.width), lambda t, v: (v, 0)),
                row,
            ],
            out_specs=[row] * 3,
            out_shape=[jax.ShapeDtypeStruct((1, tiles.tokens), jnp.float32)] * 3,
            scratch_shapes=[pltpu.VMEM((1, tiles.block_tokens), jnp.float32)] * 4,
        )(hidden, weight, labels.astype(jnp.int32)[None])
    return tuple(each[0] for each in found)


def fused_logprobs_backward(
    logprob_gradient: jax.Array,
    entropy_gradient: jax.Array,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    entropy: jax.Array,
    normalizer: jax.Array,
    temperature: float,
    block_tokens: int,
    block_vocabulary: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As the operator rl_tpu::fused_logprobs_backward: the gradients of hidden [N, D] and of weight [V, D] in their own
    types, each summed in float32. The gradient of a tile of logits is rounded to hidden's type before it is multiplied.

    Raises UserError where the tiles do not fit the TPU."""
    tiles = _tiles(hidden, weight, block_tokens, block_vocabulary, interpret)
    of_logprob = jnp.where(labels >= 0, logprob_gradient, 0.0) / temperature
    known = jnp.stack([normalizer, entropy, of_logprob, entropy_gradient / temperature]).astype(jnp.float32)
    with jax.enable_x64(False):
        labels = labels.astype(jnp.int32)[None]
        rows = 2 * tiles.tokens + tiles.token_blocks * tiles.vocabulary
        into_hidden = pl.pallas_call(
            functools.partial(_hidden_gradient, tiles, temperature),
            **tiles.options("fused_logprobs_hidden_gradient", interpret, 2, rows),
            grid=(tiles.token_blocks, tiles.vocabulary_blocks),
            in_specs=[
                _once((tiles.block_tokens, tiles.width), lambda t, v: (t, 0)),
                pl.BlockSpec((tiles.block_vocabulary, tiles.width), lambda t, v: (v, 0)),
                _once((tiles.block_tokens, 1), lambda t, v: (t, 0)),
                _once((tiles.block_tokens, len(known)), lambda t, v: (t, 0)),
            ],
            out_specs=_once((tiles.block_tokens, tiles.width), lambda t, v: (t, 0)),
            out_shape=jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
            scratch_shapes=[pltpu.VMEM((tiles.block_tokens, tiles.width), jnp.float32)],
        )(hidden, weight, labels.T, known.T)
        rows = 2 * tiles.vocabulary + tiles.vocabulary_blocks * tiles.tokens
        into_weight = pl.pallas_call(
            functools.partial(_weight_gradient, tiles, temperature),
            **tiles.options("fused_logprobs_weight_gradient", interpret, 2, rows),
            grid=(tiles.vocabulary_blocks, tiles.token_blocks),
            in_specs=[
                pl.BlockSpec((tiles.block_tokens, tiles.width), lambda v, t: (t, 0)),
                pl.BlockSpec((tiles.block_vocabulary, tiles.width), lambda v, t: (v, 0)),
                pl.BlockSpec((1, tiles.block_tokens), lambda v, t: (0, t)),
                pl.BlockSpec((len(known), tiles.block_tokens), lambda v, t: (0, t)),
            ],
            out_specs=pl.BlockSpec((tiles.block_vocabulary, tiles.width), lambda v, t: (v, 0)),
            out_shape=jax.ShapeDtypeStruct(weight.shape, weight.dtype),
            scratch_shapes=[pltpu.VMEM((tiles.block_vocabulary, tiles.width), jnp.float32)],
        )(hidden, weight, labels, known)
    return into_hidden, into_weight


class _Tiles(NamedTuple):
    tokens: int
    vocabulary: int
    width: int
    block_tokens: int
    block_vocabulary: int
    itemsize: int
    """Bytes of one number of `hidden` and `weight`."""

    @property
    def token_blocks(self) -> int:
        return pl.cdiv(self.tokens, self.block_tokens)

    @property
    def vocabulary_blocks(self) -> int:
        return pl.cdiv(self.vocabulary, self.block_vocabulary)

    def options(self, name: str, interpret: bool, products: int, rows: int) -> dict[str, Any]:
        """Of a kernel that makes so many matrix products per tile and moves so many rows of the hidden size."""
        logits = self.tokens * self.vocabulary
        return {
            "name": name,
            "interpret": interpret,
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            "cost_estimate": pl.CostEstimate(
                flops=2 * products * logits * self.width,
                transcendentals=logits,
                bytes_accessed=rows * self.width * self.itemsize,
            ),
        }

    @property
    def vmem(self) -> int:
        """Bytes of vector memory that the hungriest of the three kernels takes at most: blocks of its operands, those of the
        inner loop twice (one being fetched); a gradient's sum and result; and what the compiler was seen to need besides:
        seven tiles of logits, and products of float32 take their operands apart into pieces."""
        tokens, vocabulary = self.block_tokens * self.width, self.block_vocabulary * self.width
        hidden_gradient = tokens * (4 + 2 * self.itemsize) + 2 * vocabulary * self.itemsize
        weight_gradient = vocabulary * (4 + 4 * self.itemsize) + 2 * tokens * self.itemsize
        forward = 2 * (tokens + vocabulary) * self.itemsize
        pieces = 3 * 4 * (tokens + vocabulary) if self.itemsize == 4 else 0
        tiles = 7 * 4 * self.block_tokens * self.block_vocabulary
        return max(hidden_gradient, weight_gradient, forward) + pieces + tiles


def _tiles(hidden: jax.Array, weight: jax.Array, block_tokens: int, block_vocabulary: int, interpret: bool) -> _Tiles:
    (tokens, width), vocabulary, size = hidden.shape, weight.shape[0], hidden.dtype.itemsize
    tiles = _Tiles(tokens, vocabulary, width, block_tokens, block_vocabulary, size)
    if interpret:
        return tiles
    for name, block in (("tokens", block_tokens), ("vocabulary", block_vocabulary)):
        if block % LANES:
            raise UserError(
                f"trainer.kernels.head_block_{name}: {block} is not a multiple of {LANES}, as a TPU's tiles are"
            )
    if tiles.vmem > VMEM_BYTES:
        fitting = tiles
        while fitting.vmem > VMEM_BYTES and (largest := max(fitting.block_tokens, fitting.block_vocabulary)) > LANES:
            name = "block_tokens" if fitting.block_tokens == largest else "block_vocabulary"
            fitting = fitting._replace(**{name: largest // 2 // LANES * LANES})
        raise UserError(
            f"trainer.kernels: tiles of head_block_tokens={block_tokens} by head_block_vocabulary={block_vocabulary} take"
            f" {tiles.vmem >> 20} MiB of vector memory with a hidden size of {width}, and there are {VMEM_BYTES >> 20}:"
            f" use {fitting.block_tokens} by {fitting.block_vocabulary}"
        )
    return tiles


def _once(shape: tuple[int, ...], index_map: Callable) -> pl.BlockSpec:
    """A block in one buffer, where two would leave too little room: the next is fetched when the inner loop is through."""
    return pl.BlockSpec(shape, index_map, pipeline_mode=pl.Buffered(1))


def _forward(
    tiles, temperature, hidden, weight, labels, logprobs, entropies, normalizers, maximum, total, product, chosen
):
    """For a block of tokens: over the vocabulary, of the logits z, the maximum m, sum exp(z - m), sum exp(z - m) (z - m)
    and the label's z; a vector [1, tokens] each."""
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _():
        maximum[...] = jnp.full_like(maximum, NEVER)
        for number in (total, product, chosen):
            number[...] = jnp.zeros_like(number)

    logits = _product(weight[...], hidden[...], 1, 1) * (1 / temperature)
    entry = block * tiles.block_vocabulary + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    logits = _existing(tiles, entry, logits)
    chosen[...] += jnp.sum(jnp.where(entry == labels[...], logits, 0.0), 0, keepdims=True)
    largest = jnp.maximum(maximum[...], jnp.max(logits, 0, keepdims=True))
    below = maximum[...] - largest
    share = jnp.exp(below)
    logits -= largest
    powers = jnp.exp(logits)
    product[...] = share * (product[...] + below * total[...]) + jnp.sum(powers * logits, 0, keepdims=True)
    total[...] = share * total[...] + jnp.sum(powers, 0, keepdims=True)
    maximum[...] = largest

    @pl.when(block == tiles.vocabulary_blocks - 1)
    def _():
        spread = jnp.log(total[...])
        normalizers[...] = maximum[...] + spread
        entropies[...] = spread - product[...] / total[...]
        logprobs[...] = jnp.where(labels[...] >= 0, chosen[...] - normalizers[...], 0.0)


def _hidden_gradient(tiles, temperature, hidden, weight, labels, known, into, total):
    """For a block of tokens: the sum over the vocabulary of [tokens, vocabulary] gradients times the weight."""
    block = pl.program_id(1)
    _clear(total, block)
    _blank_tail(weight, block, tiles.vocabulary)
    logits = _product(hidden[...], weight[...], 1, 1) * (1 / temperature)
    entry = block * tiles.block_vocabulary + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    columns = [known[:, place : place + 1] for place in range(known.shape[1])]
    gradient = _logit_gradient(_existing(tiles, entry, logits), entry == labels[...], *columns)
    total[...] += _product(gradient.astype(hidden.dtype), weight[...], 1, 0)

    @pl.when(block == tiles.vocabulary_blocks - 1)
    def _():
        into[...] = total[...].astype(into.dtype)


def _weight_gradient(tiles, temperature, hidden, weight, labels, known, into, total):
    """For a block of the vocabulary: the sum over the tokens of [vocabulary, tokens] gradients times the hidden states."""
    block = pl.program_id(1)
    _clear(total, block)
    _blank_tail(hidden, block, tiles.tokens)
    _blank_tail(known, block, tiles.tokens, axis=1)
    logits = _product(weight[...], hidden[...], 1, 1) * (1 / temperature)
    entry = pl.program_id(0) * tiles.block_vocabulary + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    rows = [known[place : place + 1] for place in range(known.shape[0])]
    gradient = _logit_gradient(logits, entry == labels[...], *rows)
    total[...] += _product(gradient.astype(hidden.dtype), hidden[...], 1, 0)

    @pl.when(block == tiles.token_blocks - 1)
    def _():
        into[...] = total[...].astype(into.dtype)


def _logit_gradient(logits, chosen, normalizer, entropy, of_logprob, of_entropy):
    """With p the probabilities, d logprob / d logit = (1 at the label, else 0, minus p) and
    d entropy / d logit = -p * (log p + entropy), each times the gradient that came for it."""
    table = logits - normalizer
    gradient = jnp.exp(table) * (of_logprob + of_entropy * (table + entropy))
    return jnp.where(chosen, of_logprob, 0.0) - gradient


def _product(left, right, of_left: int, of_right: int):
    """[n, m] float32: the sum over one dimension of each."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left,
        right,
        (((of_left,), (of_right,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _existing(tiles: _Tiles, entry, logits):
    """The logits; NEVER for entries beyond the vocabulary, in the last block."""
    if tiles.vocabulary % tiles.block_vocabulary == 0:
        return logits
    return jnp.where(entry < tiles.vocabulary, logits, NEVER)


def _clear(total, block) -> None:
    @pl.when(block == 0)
    def _():
        total[...] = jnp.zeros_like(total)


def _blank_tail(operand, block, length: int, axis: int = 0) -> None:
    """Zeros where the last block of an operand goes beyond its `length`: there can be anything, and 0 times NaN is no 0."""
    tail = length % operand.shape[axis]
    if tail:

        @pl.when(block == length // operand.shape[axis])
        def _():
            place = (slice(None),) * axis + (slice(tail, None),)
            operand[place] = jnp.zeros_like(operand[place])


def _flops(hidden, weight, products: int) -> float:
    return 2.0 * products * hidden.shape[0] * hidden.shape[1] * weight.shape[0]


ROWS, PER_ROW, WHOLE = PartitionSpec("data", None), PartitionSpec("data"), PartitionSpec(None, None)

FUSED_LOGPROBS = Kernel(
    function=fused_logprobs,
    inputs=(ROWS, WHOLE, PER_ROW),
    outputs=(PER_ROW, PER_ROW, PER_ROW),
    flops=lambda hidden, weight, *_: _flops(hidden, weight, 1),
)

FUSED_LOGPROBS_BACKWARD = Kernel(
    function=fused_logprobs_backward,
    inputs=(PER_ROW, PER_ROW, ROWS, WHOLE, PER_ROW, PER_ROW, PER_ROW),
    outputs=(ROWS, WHOLE),
    reduced=(1,),
    flops=lambda of_logprob, of_entropy, hidden, weight, *_: _flops(hidden, weight, 2),
)
