"""Losses and weights against loops over single tokens."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rl_tpu.algorithms.losses import MAX_LOG_RATIO, clipped_policy_loss, supervised_loss, token_weights


def random_rows(seed: int, rows: int = 3, length: int = 20) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, sampler = -3 * torch.rand(2, rows, length, generator=generator)
    advantages = torch.randn(rows, length, generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.7).float()
    return logprobs, sampler, advantages, mask


@pytest.mark.parametrize("seed", range(5))
def test_clipped_loss_is_the_formula_of_ppo_token_by_token(seed):
    logprobs, sampler, advantages, mask = random_rows(seed)
    result = clipped_policy_loss(logprobs, sampler, advantages, mask, 0.1, 0.3)
    for at in [(r, t) for r in range(3) for t in range(20)]:
        ratio, advantage = math.exp(logprobs[at] - sampler[at]), float(advantages[at])
        bounded = min(max(ratio, 0.9), 1.3) * advantage
        expected = -min(ratio * advantage, bounded) if mask[at] else 0.0
        assert float(result.loss[at]) == pytest.approx(expected, abs=1e-5)
        assert float(result.ratio[at]) == pytest.approx(ratio * float(mask[at]), rel=1e-5)
        assert bool(result.clipped[at]) == bool(mask[at] and bounded < ratio * advantage)


def test_only_tokens_that_are_not_clipped_have_a_gradient_and_it_is_ratio_times_advantage():
    logprobs, sampler, advantages, mask = random_rows(7)
    logprobs.requires_grad_()
    result = clipped_policy_loss(logprobs, sampler, advantages, mask, 0.2, 0.2)
    result.loss.sum().backward()
    expected = -result.ratio * advantages * mask * (1 - result.clipped)
    torch.testing.assert_close(logprobs.grad, expected)
    assert result.clipped.sum() > 0
    assert not result.ratio.requires_grad


def test_masked_tokens_never_matter_even_if_they_are_not_numbers():
    logprobs, sampler, advantages, mask = random_rows(3)
    plain = clipped_policy_loss(logprobs, sampler, advantages, mask, 0.2, 0.2)
    sampler = torch.where(mask.bool(), sampler, math.nan)
    logprobs = torch.where(mask.bool(), logprobs, -math.inf).requires_grad_()
    loss = clipped_policy_loss(logprobs, sampler, advantages, mask, 0.2, 0.2).loss
    torch.testing.assert_close(loss, plain.loss)
    (loss.sum() + supervised_loss(logprobs, mask).sum()).backward()
    assert (logprobs.grad[mask == 0] == 0).all()


def test_a_token_the_sampler_thought_impossible_stays_finite():
    one = torch.ones(1, 1)
    loss = clipped_policy_loss(-0.1 * one, -200 * one, -one, one, 0.2, 0.2).loss
    assert float(loss) == pytest.approx(math.exp(MAX_LOG_RATIO))


def random_segments(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of samples of random length with a random mask, one sample without any token under it, and padding."""
    draw = random.Random(seed)
    segment_ids, mask = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(4, 30)
    for row in range(4):
        start, segment = 0, 1
        while (length := draw.randint(2, 9)) + start <= 30:
            segment_ids[row, start : start + length] = segment
            if (row, segment) != (1, 1):
                mask[row, start : start + length - 1] = torch.tensor([float(draw.random() < 0.7)] * (length - 1))
                mask[row, start] = 1
            start, segment = start + length, segment + 1
    return segment_ids, mask


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_means_they_are_called_after(seed):
    segment_ids, mask = random_segments(seed)
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    samples: dict[tuple[int, int], list[float]] = {}
    for row in range(4):
        for t in range(30):
            if mask[row, t]:
                samples.setdefault((row, int(segment_ids[row, t])), []).append(float(values[row, t]))
    assert (1, 1) not in samples
    every = [value for own in samples.values() for value in own]
    token_mean = sum(every) / len(every)
    sample_mean = sum(sum(own) / len(own) for own in samples.values()) / len(samples)
    for aggregation, expected in (("token_mean", token_mean), ("sample_mean", sample_mean)):
        weights = token_weights(mask, segment_ids, aggregation)
        assert float((weights * values).sum()) == pytest.approx(expected, abs=1e-5)
        assert float(weights.sum()) == pytest.approx(1, abs=1e-5)
        assert (weights[mask == 0] == 0).all()


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_a_batch_without_a_token_under_the_mask_weighs_nothing(aggregation):
    weights = token_weights(torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.int64), aggregation)
    assert (weights == 0).all()
