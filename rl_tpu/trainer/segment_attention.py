"""Attention whose cost is the sum over the segments of their squared lengths: no token is paired with one it cannot see.

Each segment goes through torch's flash attention by itself, neighbours of equal length together. Where segments share a
prefix, all their tokens attend to it in one more call, and both parts are joined by their normalisers, as in ring
attention (arXiv 2310.01889): softmax over two sets of keys is the mean of the softmaxes over each, weighted by the sums of
exponentials. The backward of each part is flash attention's own, given the joint output and the joint normaliser.

It is one operator to torch.compile and activation checkpointing, with the segments as a tensor: nothing is compiled again
because segments changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Part(NamedTuple):
    """Queries `start:end`, cut into `count` equal pieces, and the keys they see: each piece its own up to the query
    (`prefix` is None), or all of them the keys of the slice `prefix`."""

    queries: slice
    count: int
    prefix: slice | None

    def view(self, tensor: torch.Tensor, places: slice) -> torch.Tensor:
        """[T, heads, ...] -> [count, heads, length, ...] at the places."""
        return tensor[places].unflatten(0, (self.count, -1)).transpose(1, 2)

    def keys(self) -> slice:
        return self.prefix or self.queries


def parts(segments: torch.Tensor) -> Iterator[_Part]:
    """The calls of flash attention that `segments` need: the causal ones, then those to prefixes."""
    table = segments.tolist()
    at = 0
    while at < len(table):
        start, end = table[at][:2]
        length, count = end - start, 1
        while at + count < len(table) and table[at + count][:2] == [end, end + length]:
            end, count = end + length, count + 1
        yield _Part(slice(start, end), count, None)
        at += count
    for (start, end), sharers in groupby(table, key=itemgetter(slice(2, 4))):
        if start < end:
            first, *rest = sharers
            yield _Part(slice(first[0], (rest or [first])[-1][1]), 1, slice(start, end))


@torch.library.custom_op("rl_tpu::segment_attention", mutates_args=(), device_types="cpu")
def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of its normaliser.

    q         [T, heads, d]
    k, v      [T, kv heads, d]  kv heads divide heads
    segments  [S, 4] int64      start and end of each, in order of their start, and start and end of its prefix (0, 0 for
                                none); segments that share a prefix are neighbours. Tokens in none of them get zeros.
    returns   [T, heads, d] and [T, heads]
    """
    whole = _tokens(segments) == len(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if whole else torch.zeros(q.shape, dtype=q.dtype)
    normalizer = torch.zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for part in parts(segments):
        inputs = part.view(q, part.queries), part.view(k, part.keys()), part.view(v, part.keys())
        own_out, own_normalizer = _flash(*inputs, 0.0, part.prefix is None, scale=scale)
        into, into_normalizer = part.view(out, part.queries), part.view(normalizer, part.queries)
        if part.prefix is None:
            into.copy_(own_out)
            into_normalizer.copy_(own_normalizer)
        else:
            joint = torch.logaddexp(into_normalizer, own_normalizer)
            share = (own_normalizer - joint).exp_().unsqueeze(-1).to(q.dtype)
            into.lerp_(own_out, share)
            into_normalizer.copy_(joint)
    return out, normalizer


@segment_attention.register_fake
def _(q, k, v, segments, scale):
    normalizer = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), normalizer


@torch.library.custom_op("rl_tpu::segment_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    normalizer: torch.Tensor,
    segments: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = _tokens(segments) == len(q)
    make = torch.empty if whole else torch.zeros
    gradients = [make(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v)]
    for part in parts(segments):
        keys = part.keys()
        found = _flash_backward(
            part.view(grad, part.queries),
            part.view(q, part.queries),
            part.view(k, keys),
            part.view(v, keys),
            part.view(out, part.queries),
            part.view(normalizer, part.queries),
            0.0,
            part.prefix is None,
            scale=scale,
        )
        for whole_gradient, gradient, places in zip(gradients, found, (part.queries, keys, keys), strict=True):
            into = part.view(whole_gradient, places)
            into.copy_(gradient) if part.prefix is None else into.add_(gradient)
    return tuple(gradients)


@_backward.register_fake
def _(grad, q, k, v, out, normalizer, segments, scale):
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))


def _keep(ctx, inputs, output):
    q, k, v, segments, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _gradients(ctx, grad, _):
    q, k, v, out, normalizer, segments = ctx.saved_tensors
    return *_backward(grad, q, k, v, out, normalizer, segments, ctx.scale), None, None


segment_attention.register_autograd(_gradients, setup_context=_keep)


def _tokens(segments: torch.Tensor) -> int:
    return int((segments[:, 1] - segments[:, 0]).sum())
