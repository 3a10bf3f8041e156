"""The loss of learning from examples."""

from __future__ import annotations

import torch

from rl_tpu.algorithms.masked import at_least_float32, masked


def supervised_loss(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross-entropy per token, [R, L]: minus the log-probability of every token under the mask."""
    return -masked(at_least_float32(logprobs), mask)
