"""The loss of every token as the configuration composes it, with the statistics that belong to it."""

from __future__ import annotations

import torch

from rl_tpu.algorithms.kl import kl
from rl_tpu.algorithms.masked import masked, usable_tokens
from rl_tpu.algorithms.objectives import Bounds, find_objective
from rl_tpu.algorithms.ratios import log_ratio
from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch


class PolicyLoss:
    """objective(ratio, advantage) + kl.coefficient * KL(policy || reference) - entropy_coefficient * entropy, per token.

    Raises UserError for an objective that there is not.
    """

    def __init__(self, config: AlgorithmConfig):
        self._config = config
        self._objective = find_objective(config.objective)
        self._bounds = Bounds(config.clip_low, config.clip_high, config.dual_clip)
        self._kl_coefficient = config.kl.coefficient if config.kl.place == "loss" else 0.0

    def __call__(self, rows: PackedBatch, logprobs: torch.Tensor, entropy: torch.Tensor, tally: Tally) -> torch.Tensor:
        """[R, L], zero where `rows.loss_mask` is. A token whose log-probability is no finite number has none either."""
        mask = usable_tokens(rows.loss_mask, logprobs.detach())
        log_ratios = log_ratio(logprobs, rows.old_logprobs, mask, rows.segment_ids, self._config.ratio)
        policy = self._objective(log_ratios, logprobs, rows.advantages, mask, self._bounds)
        loss = policy.loss
        tally.mean(
            clip_fraction=policy.clipped,
            ratio_mean=policy.ratio,
            approx_kl=masked(kl(rows.old_logprobs, logprobs.detach(), "k3"), mask),
            entropy=masked(entropy, mask),
        )
        tally.maximum(ratio_max=policy.ratio)
        tally.total(excluded_tokens=rows.loss_mask - mask)
        self._tally_mismatch(rows, logprobs.detach(), mask, tally)
        if rows.reference_logprobs is not None:
            divergence = masked(kl(logprobs, rows.reference_logprobs, self._config.kl.estimator), mask)
            tally.mean(reference_kl=divergence)
            if self._kl_coefficient:
                loss = loss + self._kl_coefficient * divergence
        if self._config.entropy_coefficient:
            loss = loss - self._config.entropy_coefficient * masked(entropy, mask)
        return loss

    @staticmethod
    def _tally_mismatch(rows: PackedBatch, logprobs: torch.Tensor, mask: torch.Tensor, tally: Tally) -> None:
        """How far this policy is from the engine's, whose tokens these are: zero but for numerics while its weights are the
        same. Named and computed as by `mismatch_metrics`."""
        difference = masked(logprobs - rows.sampler_logprobs, mask).abs()
        tally.mean(logprob_diff_mean=difference, mismatch_k3=masked(kl(rows.sampler_logprobs, logprobs, "k3"), mask))
        tally.maximum(logprob_diff_max=difference)
