"""How much likelier the policy makes what was sampled than the policy it is compared with."""

from __future__ import annotations

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within plus and minus this, so that no single token makes a batch infinite."""


def usable_tokens(mask: torch.Tensor, *logprobs: torch.Tensor) -> torch.Tensor:
    """The mask [R, L], float32, without tokens any of whose log-probabilities is not finite.

    What it drops is to be counted by the caller: `(mask - usable_tokens(mask, ...)).sum()`.
    """
    usable = mask > 0
    for values in logprobs:
        usable = usable & values.isfinite()
    return usable.float()


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: neither ratios nor sums over thousands of tokens fit into it."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def difference(logprobs: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`logprobs - others` under the mask, 0 elsewhere whatever stands there; [R, L] in float32 or better."""
    return torch.where(mask > 0, at_least_float32(logprobs) - at_least_float32(others), 0.0)


def log_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    mask: torch.Tensor,
    segment_ids: torch.Tensor,
    level: Literal["token", "sequence"],
) -> torch.Tensor:
    """Logarithm of the importance ratio of every token, [R, L]; 0 outside the mask and within +-MAX_LOG_RATIO.

    token     logprobs - old_logprobs (PPO, arXiv 1707.06347, eq. 6)
    sequence  the mean of that over the masked tokens of the token's segment, the same for all of them; every one of
              them receives gradient through it (GSPO, arXiv 2507.18071, eq. 7)

    A ratio beyond the bound has no gradient. Shapes depend on no data.

    logprobs      [R, L]  of the policy being trained; the gradient flows through these alone
    old_logprobs  [R, L]  of the policy that the ratio compares with
    mask          [R, L]  1 where a token enters the loss (`usable_tokens`)
    segment_ids   [R, L]  0 .. L, within the row; the masked tokens of a segment are one sample's
    """
    ratio = difference(logprobs, old_logprobs.detach(), mask)
    if level == "sequence":
        tokens = (mask > 0).to(ratio.dtype)
        bins = ratio.new_zeros(ratio.shape[0], ratio.shape[1] + 1)
        means = bins.scatter_add(1, segment_ids, ratio) / bins.scatter_add(1, segment_ids, tokens).clamp(min=1)
        ratio = means.gather(1, segment_ids) * tokens
    elif level != "token":
        raise ValueError(f"unknown level {level!r}")
    return ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
