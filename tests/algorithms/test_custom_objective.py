"""The example of an objective of one's own, found as a configuration names it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rl_tpu.algorithms.objectives import Bounds, find_objective
from rl_tpu.algorithms.ratios import log_ratio


@pytest.fixture
def soft_gate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    return find_objective("examples.custom_objective.soft_gate:soft_gate")


def test_it_is_the_formula_of_its_paper(soft_gate):
    ratios, advantages = [0.3, 1.0, 1.7, 4.0, 9.0], [1.0, -2.0, 0.5, -0.5, 3.0]
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([[1.0, 1, 1, 1, 0]])
    held = log_ratio(logprobs, torch.zeros(1, 5), mask, torch.ones(1, 5, dtype=torch.int64), "token")
    found = soft_gate(held, logprobs, torch.tensor([advantages], dtype=torch.float64), mask, Bounds(0.2, 0.2))
    found.loss.sum().backward()
    loss = found.loss.detach()
    for t in range(4):
        tau = 1.0 if advantages[t] > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratios[t] - 1)))
        assert float(loss[0, t]) == pytest.approx(-4 / tau * gate * advantages[t])
        assert float(logprobs.grad[0, t]) == pytest.approx(-4 * gate * (1 - gate) * ratios[t] * advantages[t])
    assert found.clipped.tolist() == [[0, 0, 0, 1, 0]]
    assert float(loss[0, 4]) == float(logprobs.grad[0, 4]) == 0


def test_on_policy_it_is_the_plain_policy_gradient(soft_gate):
    logprobs, mask = torch.full((1, 2), -0.7, requires_grad=True), torch.ones(1, 2)
    held = log_ratio(logprobs, logprobs.detach(), mask, torch.ones(1, 2, dtype=torch.int64), "token")
    soft_gate(held, logprobs, torch.tensor([[1.0, -2.0]]), mask, Bounds(0.2, 0.2)).loss.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-1, 2])
