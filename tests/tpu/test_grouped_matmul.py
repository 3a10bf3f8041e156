"""The product of groups of rows: the operator and its JAX twin against one product per row in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from topologies import compiled_for

from rl_tpu.tpu.kernels import grouped_matmul as twin
from rl_tpu.trainer.kernels.grouped_matmul import grouped_matmul

ROWS, INNER, COLUMNS = 200, 160, 96
SIZES = [0, 70, 0, 13, 101, 0]
"""The last 16 rows are in no group."""
BLOCKS = 64, 128, 128
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def operands() -> list[torch.Tensor]:
    """left [T, K], right [E, N, K] and a gradient of the product, float64, with values that bfloat16 has."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, INNER), (len(SIZES), COLUMNS, INNER), (ROWS, COLUMNS)]
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


def written_out(left: torch.Tensor, right: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Product and gradients, row by row."""
    left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    rows = [right[each] @ row for each, row in zip(group, left, strict=False)]
    out = torch.stack(rows + [0 * left[0, :1] * right[0, :, 0]] * (len(left) - len(rows)))
    out.backward(grad)
    return [out.detach(), left.grad, right.grad]


def compare(found, expected: list[torch.Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        ours = torch.as_tensor(np.asarray(ours, np.float64)) if isinstance(ours, jax.Array) else ours.double()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_operator_multiplies_every_row_by_its_group_s_matrix(operands, dtype):
    left, right, grad = (tensor.clone().to(getattr(torch, dtype)).requires_grad_() for tensor in operands)
    out = grouped_matmul(left, right, torch.tensor(SIZES), *BLOCKS)
    out.backward(grad)
    compare([out.detach(), left.grad, right.grad], written_out(*operands), TOLERANCE[dtype])
    assert not left.grad[sum(SIZES) :].any()
    assert not out[sum(SIZES) :].any()


def both(left, right, sizes, grad):
    out = twin.grouped_matmul(left, right, sizes, *BLOCKS, interpret=True)
    return out, *twin.grouped_matmul_backward(grad, left, right, sizes, *BLOCKS, interpret=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_multiplies_every_row_by_its_group_s_matrix(operands, dtype):
    left, right, grad = (jnp.asarray(tensor.numpy(), dtype) for tensor in operands)
    # What is in rows of no group reaches no result.
    left, grad = (tensor.at[sum(SIZES) :].set(jnp.nan) for tensor in (left, grad))
    with jax.enable_x64(True):  # as in the programs that the kernels are put into
        found = jax.jit(both)(left, right, np.array(SIZES), grad)
    assert {str(array.dtype) for array in found} == {dtype}
    compare(found, written_out(*operands), TOLERANCE[dtype])


def test_the_operator_keeps_its_promises_to_the_compiler(operands):
    left, right, _ = (tensor.clone().requires_grad_() for tensor in operands)
    kept = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(grouped_matmul, (left, right, torch.tensor(SIZES), *BLOCKS), test_utils=kept)


@pytest.mark.parametrize("topology", ["TPU7x:2x2x1", "v6e:2x2"])
def test_libtpu_compiles_forward_and_backward(topology):
    def both(left, right, sizes, grad):
        tiles = 256, 128, 128
        out = twin.grouped_matmul(left, right, sizes, *tiles)
        return out, *twin.grouped_matmul_backward(grad, left, right, sizes, *tiles)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (8, 192, 256), (1024, 192))]
    memory = compiled_for(
        topology, both, *shapes[:2], jax.ShapeDtypeStruct((8,), jnp.int32), shapes[2]
    ).memory_analysis()
    # No expert's matrix is multiplied by rows of others: that product alone would take 8 x 1024 x 192 numbers.
    assert memory.temp_size_in_bytes < 8 * 1024 * 192 * 2
