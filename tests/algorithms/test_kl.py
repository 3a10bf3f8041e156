"""Estimators of the divergence against their formulas and against the divergence itself."""

from __future__ import annotations

import math

import pytest
import torch
import twins
from batches import agree, random_batch, rows_of

from rl_tpu.algorithms.kl import kl

ESTIMATORS = ["k1", "k2", "k3"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("apart", [1e-4, 0.5, 300.0])
def test_values_and_gradient(estimator, apart):
    batch = random_batch(1, apart=apart)
    rows = rows_of(batch)
    logprobs = rows.tensor(batch.logprobs, elsewhere=0).requires_grad_()
    found = kl(logprobs, rows.tensor(batch.old, elsewhere=0), estimator)
    (found * (rows.tensor([[1] * len(own) for own in batch.old], 0))).sum().backward()

    def pairs(values):
        return [
            [twins.kl(a, b, estimator) for a, b in zip(own, of, strict=True)]
            for own, of in zip(values, batch.old, strict=True)
        ]

    def total(values):
        return sum(value for own in pairs(values) for value in own)

    agree(rows.samples(found), pairs(batch.logprobs))
    agree(rows.samples(logprobs.grad), twins.gradient(total, batch.logprobs))
    if apart == 0.5:
        agree(rows.samples(logprobs.grad), twins.finite_differences(total, batch.logprobs), abs=1e-7)


def test_over_all_tokens_the_unbiased_ones_are_the_divergence_and_k2_has_its_gradient():
    """The expectation over a small vocabulary, summed exactly."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.3, 0.2], dtype=torch.float64), 0)

    def expected(estimator):
        table = torch.log_softmax(logits, 0)
        return (table.exp().detach() * kl(table, reference, estimator)).sum()

    table = torch.log_softmax(logits, 0)
    exact = (table.exp() * (table - reference)).sum()
    (gradient,) = torch.autograd.grad(exact, logits)
    assert float(expected("k1").detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    assert float(expected("k3").detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(expected("k2"), logits)[0], gradient)
    torch.testing.assert_close(torch.autograd.grad(expected("k1"), logits)[0], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_token_is_infinite(estimator):
    logprobs = torch.tensor([[-math.inf, math.nan, -1.0, -1e30, 0.0, -math.inf]], requires_grad=True)
    reference = torch.tensor([[-1.0, -1.0, -math.inf, 0.0, math.nan, -math.inf]])
    found = kl(logprobs, reference, estimator)
    assert found.isfinite().all()
    assert found[0, [1, 4, 5]].tolist() == [0, 0, 0]
    found.sum().backward()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_are_no_distance_apart_and_half_precision_is_widened(estimator):
    logprobs = torch.tensor([[-0.3, -5.7]], dtype=torch.bfloat16)
    assert kl(logprobs, logprobs, estimator).tolist() == [[0, 0]]
    assert kl(logprobs, logprobs, estimator).dtype == torch.float32


def test_k3_keeps_its_digits_where_policies_are_close():
    """exp(-d) - 1 + d loses everything in float32 for small d; the exact value is d^2 / 2 - d^3 / 6."""
    logprobs = torch.tensor([[1e-3]])
    assert float(kl(logprobs, torch.zeros(1, 1), "k3")) == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_reference_gets_no_gradient(estimator):
    reference = torch.tensor([[-1.0]], requires_grad=True)
    logprobs = torch.tensor([[-0.5]], requires_grad=True)
    kl(logprobs, reference, estimator).sum().backward()
    assert reference.grad is None
    assert logprobs.grad is not None
