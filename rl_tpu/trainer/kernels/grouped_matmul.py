"""Products of groups of rows with a matrix each, as one operator: the experts of a mixture, whose shapes do not depend on
how many rows each expert has.

A TPU's programs have a Pallas kernel for it (rl_tpu/tpu/kernels/grouped_matmul.py). Here it is one product per group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


@torch.library.custom_op("rl_tpu::grouped_matmul", mutates_args=())
def grouped_matmul(
    left: torch.Tensor,
    right: torch.Tensor,
    group_sizes: torch.Tensor,
    block_rows: int,
    block_inner: int,
    block_columns: int,
) -> torch.Tensor:
    """Every row times the transpose of its group's matrix.

    left           [T, K]     the rows of the first group, then those of the second, and so on
    right          [E, N, K]  in left's type; a matrix is stored as that of a linear layer
    group_sizes    [E]        integers whose sum is at most T
    block_rows     tile sizes of the TPU's kernel: rows, the summed dimension, and columns of the result; in the backward
    block_inner    those of its own products
    block_columns
    returns        [T, N] in left's type; 0 in the rows that are in no group
    """
    out = left.new_zeros(len(left), right.shape[1])
    for rows, matrix in _groups(group_sizes, right):
        torch.mm(left[rows], matrix.T, out=out[rows])
    return out


@grouped_matmul.register_fake
def _(left, right, group_sizes, block_rows, block_inner, block_columns):
    return left.new_empty(left.shape[0], right.shape[1])


@torch.library.custom_op("rl_tpu::grouped_matmul_backward", mutates_args=())
def grouped_matmul_backward(
    grad: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    group_sizes: torch.Tensor,
    block_rows: int,
    block_inner: int,
    block_columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of left and right from that of the product, `grad` [T, N]."""
    of_left, of_right = left.new_zeros(left.shape), right.new_empty(right.shape)
    for (rows, matrix), of_matrix in zip(_groups(group_sizes, right), of_right, strict=True):
        torch.mm(grad[rows], matrix, out=of_left[rows])
        torch.mm(grad[rows].T, left[rows], out=of_matrix)
    return of_left, of_right


@grouped_matmul_backward.register_fake
def _(grad, left, right, group_sizes, block_rows, block_inner, block_columns):
    return left.new_empty(left.shape), right.new_empty(right.shape)


def _keep(ctx, inputs, output):
    left, right, group_sizes, *ctx.blocks = inputs
    ctx.save_for_backward(left, right, group_sizes)


def _gradients(ctx, grad):
    return *grouped_matmul_backward(grad, *ctx.saved_tensors, *ctx.blocks), None, None, None, None


grouped_matmul.register_autograd(_gradients, setup_context=_keep)


def _groups(group_sizes: torch.Tensor, matrices: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    end = 0
    for size, matrix in zip(group_sizes.tolist(), matrices, strict=True):
        end += size
        yield slice(end - size, end), matrix
