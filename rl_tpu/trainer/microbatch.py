"""The loss of one micro-batch: the same code where it runs at once and where it becomes a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.supervised import supervised_loss
from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.loss import PolicyLoss
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch

if TYPE_CHECKING:
    from rl_tpu.trainer.policy import Policy


def microbatch_loss(
    policy: Policy,
    rows: PackedBatch,
    weights: torch.Tensor,
    loss: PolicyLoss | None,
    distribution: Distribution,
    algorithm: AlgorithmConfig,
    tally: Tally,
) -> torch.Tensor:
    """Sum over the rows' tokens of `weights` [R, L] times the loss that `loss` composes (None: cross-entropy), a scalar.
    Its statistics go into `tally`."""
    entropy_gradient = algorithm.entropy_coefficient != 0
    logprobs, entropy = policy.logprobs(rows, distribution, only_loss=True, entropy_gradient=entropy_gradient)
    rows = rows.to(policy.device)
    token_loss = loss(rows, logprobs, entropy, tally) if loss else supervised_loss(logprobs, rows.loss_mask)
    total = (token_loss * weights.to(policy.device)).sum()
    tally.total(loss=total)
    return total
