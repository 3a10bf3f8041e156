"""An objective of your own: a smooth gate where PPO has a hard clip (SAPO, arXiv 2511.20347)."""

from __future__ import annotations

import torch

from rl_tpu.algorithms.masked import masked
from rl_tpu.algorithms.objectives import Bounds, Objective

SHARPNESS = 1.0
SHARPNESS_OF_NEGATIVES = 1.05
"""Where the advantage is negative the gate closes a little faster, as the paper has it."""


def soft_gate(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, bounds: Bounds
) -> Objective:
    """loss = -4 / tau * sigmoid(tau * (ratio - 1)) * A.

    At ratio 1 its gradient is that of the plain policy gradient; the further the ratio goes, the less a token teaches, but
    none is cut off. `clipped` marks the tokens that teach less than half of what they would without the gate.
    """
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, SHARPNESS, SHARPNESS_OF_NEGATIVES)
    gate = torch.sigmoid(tau * (ratio - 1))
    share = 4 * gate * (1 - gate)
    return Objective(
        loss=masked(-4 / tau * gate * advantages, mask),
        ratio=masked(ratio.detach(), mask),
        clipped=masked((share.detach() < 0.5).to(ratio.dtype), mask),
    )
