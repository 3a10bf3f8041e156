"""Importance weights between engine and trainer against plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import twins
from batches import agree, random_batch, rows_of

from rl_tpu.algorithms.corrections import correction_weights

MODES, LEVELS = ["truncate", "mask"], ["token", "sequence", "geometric"]
every_kind = pytest.mark.parametrize(("mode", "level"), list(itertools.product(MODES, LEVELS)))


@every_kind
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.0, 1.2), (0.9, 1.1)])
@pytest.mark.parametrize("veto", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("apart", [0.3, 40.0])
def test_against_the_twin(mode, level, low, high, veto, normalise, apart):
    batch = random_batch(2, samples=9, apart=apart)
    rows = rows_of(batch)
    options = (mode, level, low, high, veto, normalise)
    given = (rows.tensor(batch.logprobs), rows.tensor(batch.old), rows.tensor(batch.masks, 0), rows.sample_ids)
    found = correction_weights(*given, *options)
    expected, metrics = twins.correction_weights(batch.logprobs, batch.old, batch.masks, *options)
    agree(rows.samples(found.weights), expected, rel=1e-6)
    assert found.metrics == pytest.approx(metrics, rel=1e-6)
    assert not found.weights.requires_grad


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["old", "sampler"])
def test_tokens_that_are_no_numbers_weigh_nothing_and_leave_the_others_alone(mode, level, bad, where):
    batch = random_batch(4)
    old, sampler = [own[:] for own in batch.logprobs], [own[:] for own in batch.old]
    at = next((s, t) for s, mask in enumerate(batch.masks) for t, inside in enumerate(mask) if inside and sum(mask) > 1)
    {"old": old, "sampler": sampler}[where][at[0]][at[1]] = bad
    rows = rows_of(batch)
    options = (mode, level, 0.5, 2.0, 1e-4, True)
    given = (rows.tensor(old), rows.tensor(sampler), rows.tensor(batch.masks, 0), rows.sample_ids)
    found = correction_weights(*given, *options)
    expected, metrics = twins.correction_weights(old, sampler, batch.masks, *options)
    agree(rows.samples(found.weights), expected, rel=1e-6)
    assert found.metrics == pytest.approx(metrics, rel=1e-6)
    assert expected[at[0]][at[1]] == 0


def one_row(gaps: list[float], ids: list[int], *options, **more):
    old, ones = torch.tensor([gaps]), torch.ones(1, len(gaps))
    return correction_weights(old, torch.zeros_like(old), ones, torch.tensor([ids]), *options, **more)


def test_closed_forms():
    """Ratios 2 and 8 of one sample, 1/2 of another: product 16, geometric mean 4."""
    gaps, ids = [math.log(2), math.log(8), math.log(0.5)], [1, 1, 2]

    def weights(mode, level, low, high):
        return one_row(gaps, ids, mode, level, low, high).weights[0].tolist()

    assert weights("truncate", "token", 0.0, 100.0) == pytest.approx([2, 8, 0.5])
    assert weights("truncate", "sequence", 0.0, 100.0) == pytest.approx([16, 16, 0.5])
    assert weights("truncate", "geometric", 0.0, 100.0) == pytest.approx([4, 4, 0.5])
    assert weights("truncate", "token", 0.9, 5.0) == pytest.approx([2, 5, 0.9])
    assert weights("mask", "token", 0.9, 5.0) == pytest.approx([2, 0, 0])
    assert weights("mask", "geometric", 0.4, 5.0) == pytest.approx([4, 4, 0.5])
    assert weights("mask", "sequence", 0.4, 5.0) == pytest.approx([0, 0, 0.5])


def test_equal_policies_weigh_one_in_every_mode_and_report_nothing():
    for mode, level in itertools.product(MODES, LEVELS):
        found = one_row([0.0] * 4, [1, 1, 2, 2], mode, level, 0.5, 2.0, veto=1e-4, normalise=True)
        assert found.weights.tolist() == [[1, 1, 1, 1]]
        assert found.metrics == {
            "weight_mean": 1.0,
            "outside_share": 0.0,
            "vetoed_samples": 0.0,
            "effective_sample_size": 1.0,
        }


def test_a_veto_takes_the_whole_sample_and_no_other():
    found = one_row([0.0, -12.0, 0.0, 0.0], [1, 1, 2, 2], "truncate", "token", 0.5, 2.0, veto=1e-4)
    assert found.weights.tolist() == [[0, 0, 1, 1]]
    assert found.metrics["vetoed_samples"] == 1
    assert found.metrics["effective_sample_size"] == 0.5
    normalised = one_row([0.0, -12.0, 0.0, 0.0], [1, 1, 2, 2], "truncate", "token", 0.5, 2.0, veto=1e-4, normalise=True)
    assert normalised.weights.tolist() == [[0, 0, 2, 2]]


def test_a_veto_below_the_smallest_held_ratio_is_still_a_veto():
    found = one_row([-25.0, -40.0], [1, 2], "truncate", "token", 0.5, 2.0, veto=1e-13)
    assert found.weights[0].tolist() == [0.5, 0]


def test_everything_vetoed_leaves_zeros():
    found = one_row([-12.0, -12.0], [1, 2], "mask", "token", 0.5, 2.0, veto=0.5, normalise=True)
    assert found.weights.tolist() == [[0, 0]]
    assert found.metrics["effective_sample_size"] == 0


def test_without_a_mode_the_weight_is_the_mask():
    mask = torch.tensor([[1.0, 0, 1]])
    found = correction_weights(
        torch.zeros(1, 3), torch.ones(1, 3), mask, torch.ones(1, 3).long(), "none", "token", 0, 1
    )
    assert found.weights.equal(mask)
    assert found.metrics == {}


@every_kind
def test_nothing_under_the_mask(mode, level):
    nothing = torch.full((2, 3), math.nan)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    found = correction_weights(nothing, nothing, torch.zeros(2, 3), ids, mode, level, 0.5, 2.0, 1e-4, True)
    assert (found.weights == 0).all()
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_half_precision_is_widened():
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    found = correction_weights(old, old + 0.125, torch.ones(1, 2), torch.ones(1, 2).long(), "truncate", "token", 0, 9)
    assert found.weights.dtype == torch.float32
    assert found.weights[0].tolist() == pytest.approx([math.exp(-0.125)] * 2)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="unknown mode 'cut'"):
        one_row([0.0], [1], "cut", "token", 0.5, 2.0)
    with pytest.raises(ValueError, match="unknown level 'word'"):
        one_row([0.0], [1], "mask", "word", 0.5, 2.0)
