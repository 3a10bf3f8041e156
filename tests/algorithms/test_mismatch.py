"""Metrics of the distance between engine and trainer against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
import twins
from batches import random_batch, rows_of

from rl_tpu.algorithms.mismatch import effective_sample_size, mismatch_metrics


@pytest.mark.parametrize("apart", [1e-3, 0.3, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_against_the_twin(apart, seed):
    batch = random_batch(seed, apart=apart)
    trainer = [[min(value, 0.0) for value in own] for own in batch.logprobs]
    rows = rows_of(batch, seed)
    given = (rows.tensor(trainer), rows.tensor(batch.old), rows.tensor(batch.masks, 0), rows.sample_ids)
    assert mismatch_metrics(*given) == pytest.approx(twins.mismatch(trainer, batch.old, batch.masks), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_no_numbers_are_counted_and_left_out(bad):
    batch = random_batch(4)
    at = next((s, t) for s, mask in enumerate(batch.masks) for t, inside in enumerate(mask) if inside)
    batch.old[at[0]][at[1]] = bad
    rows = rows_of(batch)
    given = (rows.tensor(batch.logprobs), rows.tensor(batch.old), rows.tensor(batch.masks, 0), rows.sample_ids)
    found = mismatch_metrics(*given)
    assert found["unusable_tokens"] == 1
    assert found == pytest.approx(twins.mismatch(batch.logprobs, batch.old, batch.masks), rel=1e-6)


def test_equal_policies_are_no_distance_apart():
    logprobs = -torch.rand(2, 5).bfloat16()
    found = mismatch_metrics(logprobs, logprobs, torch.ones(2, 5), torch.tensor([[1] * 5, [2] * 5]))
    assert found.pop("effective_sample_size_tokens") == pytest.approx(1)
    assert found.pop("effective_sample_size_sequences") == pytest.approx(1)
    assert set(found.values()) == {0.0}


def test_nothing_under_the_mask_is_no_distance():
    nothing = torch.full((2, 3), math.nan)
    found = mismatch_metrics(nothing, nothing, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    assert found.pop("effective_sample_size_tokens") == 1
    assert found.pop("effective_sample_size_sequences") == 1
    assert set(found.values()) == {0.0}


def test_effective_sample_size_counts_what_matters():
    assert effective_sample_size(torch.ones(8)) == 1
    assert effective_sample_size(torch.tensor([5.0, 0, 0, 0])) == 0.25
    assert effective_sample_size(torch.zeros(4)) == 0
    assert effective_sample_size(torch.tensor([])) == 1


def test_a_long_answer_that_drifts_token_by_token_shows_in_the_sequences():
    """1000 tokens each 3% likelier in one of two answers: their products are e^30 apart, one answer outweighs all."""
    trainer = torch.stack([torch.full((1000,), -0.97), torch.full((1000,), -1.0)])
    ids = torch.tensor([[1], [2]]).expand(2, 1000)
    found = mismatch_metrics(trainer, torch.full((2, 1000), -1.0), torch.ones(2, 1000), ids)
    assert found["effective_sample_size_sequences"] == pytest.approx(0.5)
    assert found["effective_sample_size_tokens"] > 0.999


def test_ratios_of_answers_that_no_float_holds_are_compared_all_the_same():
    """Products of e^1000, e^1000 and e^-1000: two answers of equal weight and one of none."""
    trainer = torch.tensor([[0.0], [0.0], [-2000.0]])
    found = mismatch_metrics(trainer, torch.full((3, 1), -1000.0), torch.ones(3, 1), torch.tensor([[1], [2], [3]]))
    assert found["effective_sample_size_sequences"] == pytest.approx(2 / 3)
    assert math.isfinite(found["mismatch_k3"])
