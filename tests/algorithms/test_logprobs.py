"""Chunked log-probabilities against torch's log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch

from rl_tpu.algorithms.logprobs import label_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_elements", [1, 17 * 5, 1 << 26])
def test_values_and_gradient_are_those_of_log_softmax(temperature, chunk_elements):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 7, 17, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 17, (3, 7), generator=generator)
    labels[0, 3:] = -100
    weights = torch.randn(3, 7, generator=generator)

    ours = logits.float().requires_grad_()
    logprobs, entropy = label_logprobs(ours, labels, temperature, chunk_elements)
    (logprobs * weights).sum().backward()

    theirs = logits.requires_grad_()
    table = torch.log_softmax(theirs / temperature, -1)
    expected = table.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    (expected * weights).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(table.exp() * table).sum(-1).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert not entropy.requires_grad


def test_logits_of_half_precision_are_computed_in_float32():
    logits = (8 * torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(1))).bfloat16().requires_grad_()
    labels = torch.arange(10).view(2, 5)
    logprobs, entropy = label_logprobs(logits, labels, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = torch.log_softmax(logits.detach().double(), -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
