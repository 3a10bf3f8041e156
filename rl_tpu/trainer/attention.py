"""Attention inside the segments of packed rows, as a torchtitan module, and what tells it where they are.

torchtitan 0.3.0 ships FlexAttention (no backward on a CPU) and variable-length attention (no CPU kernel). There are three
here that compute the same: one by segments, for devices whose programs may depend on the data; and for programs that do
not, one under a mask, which holds a number for every pair of a row's tokens, and one that a TPU has a kernel for, without
shared prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.protocols.module import Module

from rl_tpu.trainer.kernels.splash_attention import splash_attention
from rl_tpu.trainer.segment_attention import segment_attention


class SegmentAttention(Module):
    """Softmax attention of every token to its own segment up to itself, and to all of its prefix. The names of the
    arguments are torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        block_q: int = 128
        block_kv: int = 128
        """Tile sizes of rl_tpu::splash_attention; by default the least that a TPU takes."""

    def __init__(self, config: Config):
        super().__init__()
        self.blocks = config.block_q, config.block_kv

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """q [R, L, heads, d], k and v [R, L, kv heads, d] -> [R, L, heads, d].

        attention_masks says which of the three it is: what `segment_table` makes, for one row without padding (what
        follows the last segment gets zeros); the bool that `segment_mask` makes; or [R, L] int32 segment ids, for
        rl_tpu::splash_attention. With the latter two what comes out for padding is finite and means nothing.
        """
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        if attention_masks.dtype == torch.int32:
            return splash_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, *self.blocks)[0]
        if attention_masks.dtype == torch.bool:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
            out = scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(1, 2)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out, _ = segment_attention(q, k, v, attention_masks, scale)
        return out.view_as(q_BLNH)


def segment_mask(segment_ids: torch.Tensor, prefix_ids: torch.Tensor) -> torch.Tensor:
    """[R, L] segment and prefix ids -> [R, 1, L, L] bool: which tokens (last axis) each one sees. Padding sees padding."""
    keys = segment_ids.unsqueeze(1)
    own = segment_ids.unsqueeze(2) == keys
    prefix = (prefix_ids.unsqueeze(2) == keys) & (keys > 0)
    return (own | prefix).tril_().unsqueeze(1)


def segment_table(segment_ids: torch.Tensor, prefix_ids: torch.Tensor) -> torch.Tensor:
    """[R, L] segment and prefix ids on the host -> [S, 4] int64, also there: start and end of every segment, and start
    and end of its prefix (0, 0 for none). Places are counted through all rows, without padding."""
    first = torch.arange(len(segment_ids)).unsqueeze(1) * (int(segment_ids.max()) + 1)
    real = segment_ids > 0
    names = (first + segment_ids)[real]
    prefixes = torch.where(prefix_ids > 0, first + prefix_ids, 0)[real]
    segments, lengths = torch.unique_consecutive(names, return_counts=True)
    ends = lengths.cumsum(0)
    spans = torch.stack([ends - lengths, ends], 1)
    prefixes = prefixes[spans[:, 0]]
    # Names ascend. A prefix that there is not finds some segment, and multiplied by 0 nothing.
    found = spans[torch.searchsorted(segments, prefixes)] * (prefixes > 0).unsqueeze(1)
    return torch.cat([spans, found], 1)
