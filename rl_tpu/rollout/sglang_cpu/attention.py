"""Decoding attention for many requests at once, in place of SGLang's torch_native, which computes one after the other.

A small model on a CPU spends most of its time in that loop. Requests of similar length are computed together instead, their
keys and values padded to the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MOST_PADDING = 1.25
"""So much longer than its shortest request may the longest of a chunk be, for they are computed at that length."""
CHUNK_BYTES = 2**20
"""Keys of a chunk: what fits a core's cache, and what the allocator keeps instead of giving it back to the system."""
FEW_TOKENS = 64
"""Lengths up to this differ too little to matter."""


def decode(
    one_by_one: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Around ``TorchNativeAttnBackend._run_sdpa_forward_decode``, which still does it for models with an encoder.

    query, output       [requests, heads, head size], one new token each
    k_cache, v_cache    [tokens, key-value heads, head size]
    req_to_token        [request slots, tokens]: where in the cache a request's tokens are
    req_pool_indices    [requests]: its slot
    seq_lens            [requests]: its tokens, the new one included
    """
    if encoder_lens is not None:
        where = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
        how = (scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
        return one_by_one(backend, query, output, *where, *how)
    heads, key_heads = query.shape[1], k_cache.shape[1]
    queries = query.unflatten(1, (key_heads, heads // key_heads))  # heads that share keys are queries of one head
    results = output.unflatten(1, (key_heads, heads // key_heads))
    for chosen, longest in chunks(seq_lens, CHUNK_BYTES // k_cache[0].nbytes):
        places = req_to_token[req_pool_indices[chosen], :longest]
        lengths, positions = seq_lens[chosen, None], torch.arange(longest)
        seen = positions < lengths
        if sliding_window_size is not None:
            seen &= positions >= lengths - 1 - sliding_window_size
        # Beyond its tokens a slot holds whatever was there before, perhaps places that do not exist any more.
        places = places.where(seen, 0).flatten()
        keys, values = (_rows(cache, places).unflatten(0, seen.shape).transpose(1, 2) for cache in (k_cache, v_cache))
        mask = seen[:, None, None, :]
        attended = scaled_dot_product_attention(
            queries[chosen], keys.to(query.dtype), values.to(query.dtype), attn_mask=mask, scale=scaling
        )
        results[chosen] = attended
    return output


def _rows(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    # Many times faster than indexing with a tensor.
    return cache.flatten(1).index_select(0, places).unflatten(1, cache.shape[1:])


def chunks(seq_lens: torch.Tensor, most_tokens: int) -> list[tuple[torch.Tensor, int]]:
    """Requests of similar length, which padded have so many tokens at most unless it is one alone: their numbers, and the
    tokens of the longest of them."""
    lengths, order = seq_lens.sort()
    found, start = [], 0
    values = lengths.tolist()
    for end in range(1, len(values) + 1):
        if (
            end == len(values)
            or values[end] > max(FEW_TOKENS, MOST_PADDING * values[start])
            or (end + 1 - start) * values[end] > most_tokens
        ):
            found.append((order[start:end], values[end - 1]))
            start = end
    return found
