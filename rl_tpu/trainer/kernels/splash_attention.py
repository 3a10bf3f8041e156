"""Attention inside the segments of packed rows as one operator over whole rows, whose shapes do not depend on the data.

A TPU's programs have a Pallas kernel for it (rl_tpu/tpu/kernels/splash_attention.py). Here it is computed by segments, as
rl_tpu::segment_attention does, on a CPU: the padding of each row is one more segment.
"""

from __future__ import annotations

import torch

from rl_tpu.trainer.segment_attention import segment_attention


@torch.library.custom_op("rl_tpu::splash_attention", mutates_args=(), device_types="cpu")
def splash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment_ids: torch.Tensor,
    scale: float,
    block_q: int,
    block_kv: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every token to its own segment up to itself, and the logarithm of its normaliser.

    q            [R, L, H, d]
    k, v         [R, L, K, d]   K divides H: query head h has key-value head h // (H / K)
    segment_ids  [R, L]         integers: equal for the neighbours that are one segment, 0 for padding, which comes last
    block_q,     tile sizes of the TPU's kernel, which needs L to be a multiple of 128: it takes the greatest multiple of
    block_kv     128 that divides L and is no more
    returns      [R, L, H, d] in q's type and [R, L, H] float32 (float64 for float64); what they are for padding is finite
                 and means nothing
    """
    out, normalizer = segment_attention(*_flat(q, k, v), _spans(segment_ids), scale)
    return out.view(q.shape), normalizer.view(q.shape[:3])


@splash_attention.register_fake
def _(q, k, v, segment_ids, scale, block_q, block_kv):
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("rl_tpu::splash_attention_backward", mutates_args=(), device_types="cpu")
def splash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    segment_ids: torch.Tensor,
    scale: float,
    block_q: int,
    block_kv: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of the output, `grad` [R, L, H, d], and the forward's results."""
    found = torch.ops.rl_tpu.segment_attention_backward(
        *_flat(grad, q, k, v, out, logsumexp), _spans(segment_ids), scale
    )
    return tuple(gradient.view(tensor.shape) for gradient, tensor in zip(found, (q, k, v), strict=True))


@splash_attention_backward.register_fake
def _(grad, q, k, v, out, logsumexp, segment_ids, scale, block_q, block_kv):
    return _like(q), _like(k), _like(v)


def _keep(ctx, inputs, output):
    q, k, v, segment_ids, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, segment_ids)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    return *splash_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


splash_attention.register_autograd(_gradients, setup_context=_keep)


def _spans(segment_ids: torch.Tensor) -> torch.Tensor:
    """[R, L] -> the table of `segment_attention` that has the padding of a row as a segment."""
    first = torch.arange(len(segment_ids)).unsqueeze(1) * (segment_ids.max() + 1)
    _, lengths = torch.unique_consecutive((first + segment_ids).flatten(), return_counts=True)
    ends = lengths.cumsum(0)
    nothing = torch.zeros_like(ends)
    return torch.stack([ends - lengths, ends, nothing, nothing], 1)


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[R, L, ...] -> [R * L, ...]."""
    return [tensor.flatten(0, 1) for tensor in tensors]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
