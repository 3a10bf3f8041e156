"""How much likelier the policy makes what was sampled than the policy it is compared with."""

from __future__ import annotations

from typing import Literal

import torch

from rl_tpu.algorithms.masked import difference

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within plus and minus this, so that no single token makes a batch infinite."""


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
