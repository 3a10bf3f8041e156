"""Splash attention: the operator and its JAX twin against attention written out in float64, and libtpu's word on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from topologies import compiled_for

from rl_tpu.errors import UserError
from rl_tpu.tpu.kernels import splash_attention as twin
from rl_tpu.trainer.kernels.splash_attention import splash_attention

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 16, 384
ROWS = [[100, 37, 180], [1, 127, 128, 128], []]
"""Lengths of the segments of each row; what is left is padding."""
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 4e-2}
NUMBERS = 0.3, 128, 256  # scale, and tiles; those of keys do not divide 384, so that 128 is taken


def segment_ids(rows: list[list[int]] = ROWS, length: int = LENGTH) -> torch.Tensor:
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, lengths in zip(ids, rows, strict=True):
        for number, (start, size) in enumerate(zip(np.cumsum([0, *lengths]), lengths, strict=False), 1):
            row[start : start + size] = number
    return ids


@pytest.fixture(scope="module")
def operands() -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, float64, with values that bfloat16 has."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(ROWS), LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


@pytest.fixture(scope="module")
def expected(operands) -> list[torch.Tensor]:
    """Output, normaliser and gradients by the definition: a softmax over all pairs of a row under a mask."""
    q, k, v, grad = (tensor.clone().requires_grad_() for tensor in operands)
    ids = segment_ids()
    seen = (ids[:, :, None] == ids[:, None]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    keys, values = (tensor.repeat_interleave(HEADS // KV_HEADS, 2) for tensor in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", q, keys) * NUMBERS[0]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    out = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), values)
    out.backward(grad)
    return [tensor.detach() for tensor in (out, scores.logsumexp(-1).transpose(1, 2), q.grad, k.grad, v.grad)]


def compare(found: list, expected: list[torch.Tensor], tolerance: float) -> None:
    """At the tokens of segments, in units of the largest expected value; everywhere finite."""
    real = segment_ids() > 0
    for ours, theirs in zip(found, expected, strict=True):
        ours = torch.as_tensor(np.asarray(ours, np.float64)) if isinstance(ours, jax.Array) else ours.double()
        assert ours.isfinite().all()
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=tolerance * float(theirs[real].abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_operator_equals_attention_written_out(operands, expected, dtype):
    q, k, v, grad = (tensor.clone().to(getattr(torch, dtype)).requires_grad_() for tensor in operands)
    out, normalizer = splash_attention(q, k, v, segment_ids(), *NUMBERS)
    out.backward(grad)
    assert out.dtype == q.dtype
    compare([out.detach(), normalizer.detach(), q.grad, k.grad, v.grad], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_equals_attention_written_out(operands, expected, dtype):
    q, k, v, grad = (jnp.asarray(tensor.numpy(), dtype) for tensor in operands)

    @jax.jit
    def both(q, k, v, ids, grad):
        out, normalizer = twin.splash_attention(q, k, v, ids, *NUMBERS, interpret=True)
        gradients = twin.splash_attention_backward(grad, q, k, v, out, normalizer, ids, *NUMBERS, interpret=True)
        return out, normalizer, *gradients

    with jax.enable_x64(True):  # as in the programs that the kernels are put into
        found = both(q, k, v, segment_ids().numpy(), grad)
    assert [str(array.dtype) for array in found] == [dtype, "float32", dtype, dtype, dtype]
    compare(list(found), expected, TOLERANCE[dtype])


def test_the_operator_keeps_its_promises_to_the_compiler(operands):
    q, k, v, _ = (tensor[:, :8].clone().requires_grad_() for tensor in operands)
    kept = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(splash_attention, (q, k, v, segment_ids()[:, :8], *NUMBERS), test_utils=kept)


def test_tiles_without_a_common_segment_are_skipped():
    blocks = twin.splash.BlockSizes(block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128)
    ids = segment_ids([[128] * 8, [1024], [100, 500], []], 1024).numpy()
    _, by_query, by_key = jax.jit(lambda ids: twin._tiles(ids, blocks))(ids)
    computed = by_query.block_mask.reshape(4, 8, 8)
    # One segment per tile; the whole triangle; 100 + 28, then up to 600, then padding from the fifth tile on; padding.
    assert computed.sum((1, 2)).tolist() == [8, 36, 5 * 6 // 2 + 4 * 5 // 2 - 1, 36]
    np.testing.assert_array_equal(by_key.block_mask[0].reshape(8, 4, 8).swapaxes(0, 1), computed)
    # What is loaded at a step is what is computed at it, and nothing else than what the row computes before or after.
    loaded = np.asarray(by_query.data_next).reshape(4, 8, 8) - 8 * np.arange(4)[:, None, None]
    for query, key in zip(*np.nonzero(np.asarray(computed[0])), strict=True):
        assert (loaded[0, query] == key).all()
    assert (loaded[1] == np.minimum(np.arange(8), np.arange(8)[:, None])).all()


@pytest.mark.parametrize(
    ("length", "block", "found"), [(512, 512, 512), (384, 256, 128), (640, 4096, 640), (768, 512, 384)]
)
def test_a_tile_divides_the_row(length, block, found):
    assert twin.tile(length, block) == found


def test_rows_that_no_tile_divides_are_refused():
    with pytest.raises(UserError, match=r"trainer\.row_tokens: 200 is not a multiple of 128"):
        twin.tile(200, 512)


@pytest.mark.parametrize(("topology", "dim"), [("TPU7x:2x2x1", 128), ("v6e:2x2", 128), ("v6e:2x2", 64)])
def test_libtpu_compiles_forward_and_backward(topology, dim):
    def both(q, k, v, ids, grad):
        out, normalizer = twin.splash_attention(q, k, v, ids, dim**-0.5, 256, 128)
        return out, *twin.splash_attention_backward(grad, q, k, v, out, normalizer, ids, dim**-0.5, 256, 128)

    q, k = (jax.ShapeDtypeStruct((2, 512, heads, dim), jnp.bfloat16) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    memory = compiled_for(topology, both, q, k, k, ids, q).memory_analysis()
    # Less than the scores of one pass would take: 2 rows, 4 heads, 512 x 512 pairs, float32.
    assert memory.temp_size_in_bytes < 2 * 4 * 512 * 512 * 4
