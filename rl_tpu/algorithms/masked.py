"""Values under a mask: what stands elsewhere never matters, not even if it is no number."""

from __future__ import annotations

import torch


def usable_tokens(mask: torch.Tensor, *logprobs: torch.Tensor) -> torch.Tensor:
    """The mask [R, L], float32, without tokens any of whose log-probabilities is not finite.

    What it drops is to be counted by the caller: `(mask - usable_tokens(mask, ...)).sum()`.
    """
    usable = mask > 0
    for values in logprobs:
        usable = usable & values.isfinite()
    return usable.float()


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` under the mask, 0 elsewhere; [R, L]."""
    return torch.where(mask > 0, values, 0.0)


def difference(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`logprobs - others` under the mask, 0 elsewhere; [R, L] in float32 or better."""
    return masked(at_least_float32(logprobs) - at_least_float32(others), mask)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: neither ratios nor sums over thousands of tokens fit into it."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
