"""Attention inside the samples of a packed row, as a torchtitan module.

torchtitan 0.3.0 ships FlexAttention (no backward on a CPU) and variable-length attention (no CPU kernel); this one is
torch's scaled_dot_product_attention with a mask, which every device has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.protocols.module import Module


class DocumentAttention(Module):
    """Softmax attention under a mask that `document_mask` makes. The names of the arguments are torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

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
        """q [R, L, heads, d], k and v [R, L, kv heads, d], mask [R, 1, L, L] -> [R, L, heads, d]."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out = scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


def document_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """[R, L] segment ids -> [R, 1, L, L] bool: a token sees itself and what came before it in the same sample."""
    same_segment = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)
    return same_segment.tril_().unsqueeze(1)
