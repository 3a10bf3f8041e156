"""Losses per token, and the weights that turn them into one number.

A loss is a tensor of the packed rows' shape [R, L]: R rows of L tokens, position t standing for the prediction of token
t + 1. Weights of the same shape add the tokens up; they are made once for a whole minibatch, before it is cut into ranks
and micro-batches, so the gradient does not depend on how it is cut.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rl_tpu.algorithms.ratios import MAX_LOG_RATIO
from rl_tpu.algorithms.supervised import supervised_loss

__all__ = ["MAX_LOG_RATIO", "PolicyLoss", "clipped_policy_loss", "supervised_loss", "token_weights"]


class PolicyLoss(NamedTuple):
    """All [R, L] and zero where the mask is: the loss, the ratio, and 1 where clipping decided the loss."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def clipped_policy_loss(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), per token, with a bound on either side as in DAPO.

    With ratio = exp(logprobs - sampler_logprobs) the loss is
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); clip_high > clip_low is DAPO's clip-higher
    (arXiv 2503.14476, eq. 10). GRPO (arXiv 2402.03300) gives every token its sample's advantage.

    logprobs          [R, L]  of the policy being trained; the gradient flows through these alone
    sampler_logprobs  [R, L]  of the policy that wrote the tokens
    advantages        [R, L]
    mask              [R, L]  1 where the policy wrote the predicted token
    """
    log_ratio = torch.where(mask.bool(), logprobs - sampler_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(
        loss=-torch.minimum(plain, bounded) * mask,
        ratio=ratio.detach() * mask,
        clipped=(bounded < plain).to(mask.dtype) * mask,
    )


def token_weights(
    mask: torch.Tensor, segment_ids: torch.Tensor, aggregation: Literal["token_mean", "sample_mean"]
) -> torch.Tensor:
    """Weights [R, L] that add up to 1 over the minibatch (to 0 when no token is under the mask).

    token_mean   every token counts the same: 1 / tokens (DAPO, arXiv 2503.14476, section 3.3)
    sample_mean  every sample counts the same, its tokens share alike: 1 / (samples * tokens of the sample) (GRPO,
                 arXiv 2402.03300, eq. 3); a sample without a token under the mask does not count

    mask         [R, L]  1 where a token enters the loss
    segment_ids  [R, L]  1, 2, ... per sample of the row, 0 for padding
    """
    if aggregation == "token_mean":
        return mask / mask.sum().clamp(min=1)
    segments = int(segment_ids.max()) + 1
    rows = torch.arange(mask.shape[0]).unsqueeze(1)
    sample = rows * segments + segment_ids
    tokens = torch.zeros(mask.shape[0] * segments, dtype=mask.dtype).scatter_add_(0, sample.flatten(), mask.flatten())
    samples = (tokens > 0).sum()
    return mask / (tokens[sample].clamp(min=1) * samples.clamp(min=1))
