"""How far the trainer's policy is from the engine's on what the engine sampled."""

from __future__ import annotations

import torch

from rl_tpu.algorithms.aggregation import sample_sums
from rl_tpu.algorithms.masked import at_least_float32, difference, usable_tokens
from rl_tpu.algorithms.ratios import MAX_LOG_RATIO


@torch.no_grad()
def mismatch_metrics(
    trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor, sample_ids: torch.Tensor
) -> dict[str, float]:
    """The distance between two policies that should be one, over the tokens under the mask.

    With d = trainer_logprobs - sampler_logprobs:
    logprob_diff_mean, logprob_diff_max          of |d|
    probability_diff_mean, probability_diff_max  of |exp(trainer_logprobs) - exp(sampler_logprobs)|
    mismatch_k3                      mean of exp(d) - 1 - d, an estimate of KL(engine || trainer)
    effective_sample_size_tokens     of the tokens, weighted by exp(d); a share of their number, 1 when all agree
    effective_sample_size_sequences  of the samples, weighted by the product of exp(d) over their tokens
    unusable_tokens                  tokens left out because a log-probability is not finite

    All [R, L]; `sample_ids` 1, 2, ... per sample of the minibatch, 0 for padding and shared prompts.
    """
    inside = usable_tokens(mask, trainer_logprobs, sampler_logprobs)
    used = inside > 0
    gaps = difference(trainer_logprobs, sampler_logprobs, inside)
    bounded = gaps.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    probabilities = at_least_float32(trainer_logprobs).exp() - at_least_float32(sampler_logprobs).exp()
    tokens = inside.sum().clamp(min=1)
    sequences = sample_sums(gaps, sample_ids)[sample_sums(inside, sample_ids) > 0]

    def mean(values: torch.Tensor) -> float:
        return float(values[used].sum() / tokens)

    def largest(values: torch.Tensor) -> float:
        return float(values[used].max()) if used.any() else 0.0

    return {
        "logprob_diff_mean": mean(gaps.abs()),
        "logprob_diff_max": largest(gaps.abs()),
        "probability_diff_mean": mean(probabilities.abs()),
        "probability_diff_max": largest(probabilities.abs()),
        "mismatch_k3": mean(torch.expm1(bounded) - bounded),
        "effective_sample_size_tokens": effective_sample_size(_proportional(gaps[used])),
        "effective_sample_size_sequences": effective_sample_size(_proportional(sequences)),
        "unusable_tokens": float(((mask > 0) & ~used).sum()),
    }


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / (n * sum w^2) of n weights (Kish): 1 when all are equal, 1 / n when one outweighs all, 0 when all are 0.

    Of no weights at all it is 1.
    """
    if not weights.numel():
        return 1.0
    squares = weights.square().sum()
    return float(weights.sum().square() / (weights.numel() * squares)) if squares > 0 else 0.0


def _proportional(log_weights: torch.Tensor) -> torch.Tensor:
    """Weights up to a common factor, which the effective sample size does not depend on."""
    return (log_weights - log_weights.max()).exp() if log_weights.numel() else log_weights
