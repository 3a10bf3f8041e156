"""Estimates of the divergence from the reference policy, from the sampled tokens alone."""

from __future__ import annotations

from typing import Literal

import torch

from rl_tpu.algorithms.masked import at_least_float32
from rl_tpu.algorithms.ratios import MAX_LOG_RATIO


def kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Estimate of KL(policy || reference) at every token, [R, L] (http://joschu.net/blog/kl-approx.html).

    With d = logprobs - reference_logprobs:
    k1  d                 unbiased, of either sign; its gradient is 0 in expectation, so it belongs into the reward
    k2  d^2 / 2           biased; on-policy its gradient is that of the divergence
    k3  exp(-d) - 1 + d   unbiased, never negative, of low variance (GRPO, arXiv 2402.03300, eq. 4)

    Finite for every token: d is held within +-MAX_LOG_RATIO, and counts 0 where it is not a number; such tokens are to
    be left out and counted (`usable_tokens`).

    logprobs            [R, L]  of the policy being trained; the gradient flows through these alone
    reference_logprobs  [R, L]
    """
    gap = at_least_float32(logprobs) - at_least_float32(reference_logprobs).detach()
    gap = torch.where(gap.isnan(), 0.0, gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator == "k3":
        return torch.expm1(-gap) + gap
    raise ValueError(f"unknown estimator {estimator!r}")
