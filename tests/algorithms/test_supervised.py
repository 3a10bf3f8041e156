"""Cross-entropy of the tokens under the mask."""

from __future__ import annotations

import math

import torch

from rl_tpu.algorithms.supervised import supervised_loss


def test_is_minus_the_logprob_under_the_mask_and_nothing_elsewhere():
    logprobs = torch.tensor([[-0.5, math.nan, -2.0, -math.inf]], requires_grad=True)
    loss = supervised_loss(logprobs, torch.tensor([[1.0, 0, 1, 0]]))
    assert loss.tolist() == [[0.5, 0, 2, 0]]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-1, 0, -1, 0]]


def test_half_precision_is_widened():
    assert supervised_loss(torch.tensor([[-1.5]], dtype=torch.bfloat16), torch.ones(1, 1)).dtype == torch.float32
