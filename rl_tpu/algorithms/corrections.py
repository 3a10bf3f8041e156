"""Importance weights between the engine that wrote the samples and the trainer's policy of the same version.

Both hold the same weights and still disagree: other kernels, other rounding, other batching. What was sampled is then
off-policy from the first update on (https://fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from rl_tpu.algorithms.aggregation import sample_sums
from rl_tpu.algorithms.masked import difference, usable_tokens
from rl_tpu.algorithms.mismatch import effective_sample_size
from rl_tpu.algorithms.ratios import MAX_LOG_RATIO


class Correction(NamedTuple):
    """What the losses of a minibatch are multiplied with, and what became of it."""

    weights: torch.Tensor
    """[R, L], 0 outside the mask and where a token left the loss; no gradient."""
    metrics: dict[str, float]
    """weight_mean             of the weights within bounds and after the veto, over the tokens, before normalisation
    outside_share           share of the tokens whose weight was below low or above high
    vetoed_samples          samples that left the loss whole
    effective_sample_size   of the tokens, by the weights returned; a share of their number"""


@torch.no_grad()
def correction_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sample_ids: torch.Tensor,
    mode: Literal["none", "truncate", "mask"],
    level: Literal["token", "sequence", "geometric"],
    low: float,
    high: float,
    veto: float = 0.0,
    normalise: bool = False,
) -> Correction:
    """One weight for every token of a whole minibatch, exp(old_logprobs - sampler_logprobs) with bounds.

    Level: `token` takes each token's own ratio, `sequence` the product over the sample's masked tokens for each of them,
    `geometric` their geometric mean. Mode: `truncate` holds it within [low, high] (low = 0: truncated importance
    sampling), `mask` keeps it inside and takes the token, or at the other levels the sample, out of the loss outside
    (masked importance sampling); `none` is 1 everywhere.

    A sample with a token whose own ratio is below `veto` leaves the loss whole. `normalise` divides by the mean weight
    over the mask, those that left counting 0, so that the mean becomes 1 (self-normalised importance sampling).
    Tokens that leave do so with weight 0: they stay in the divisors of `token_weights`. Tokens whose log-probabilities
    are not finite get 0 and count nowhere.

    old_logprobs      [R, L]  of the trainer's policy before the update
    sampler_logprobs  [R, L]  of the engine
    mask              [R, L]  1 where a token enters the loss
    sample_ids        [R, L]  1, 2, ... per sample of the minibatch, 0 for padding and shared prompts
    """
    inside = usable_tokens(mask, old_logprobs, sampler_logprobs)
    if mode == "none":
        return Correction(inside, {})
    if mode not in ("truncate", "mask"):
        raise ValueError(f"unknown mode {mode!r}")
    token = difference(old_logprobs, sampler_logprobs, inside)
    raw = _at_level(token, inside, sample_ids, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = ((raw < low) | (raw > high)).to(raw.dtype) * inside
    weights = (raw.clamp(low, high) if mode == "truncate" else raw * (1 - outside)) * inside
    vetoed = torch.zeros(())
    if veto > 0:
        condemned = sample_sums((token < math.log(veto)).float() * inside, sample_ids) > 0
        weights, vetoed = weights * ~condemned[sample_ids], condemned.sum()
    tokens = inside.sum().clamp(min=1)
    mean = weights.sum() / tokens
    if normalise and mean > 0:
        weights = weights / mean
    return Correction(
        weights,
        {
            "weight_mean": float(mean),
            "outside_share": float(outside.sum() / tokens),
            "vetoed_samples": float(vetoed),
            "effective_sample_size": effective_sample_size(weights[inside > 0]),
        },
    )


def _at_level(token: torch.Tensor, inside: torch.Tensor, sample_ids: torch.Tensor, level: str) -> torch.Tensor:
    if level == "token":
        return token
    sums = sample_sums(token, sample_ids)
    if level == "geometric":
        sums = sums / sample_sums(inside.to(token.dtype), sample_ids).clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"unknown level {level!r}")
    return sums[sample_ids]
