"""Intervals and the paired test against scipy, against all sign changes written out, and in repeated experiments."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy.stats

from rl_tpu.algorithms.statistics import ENUMERATED, paired_difference, share_interval


@pytest.mark.parametrize(("solved", "prompts"), [(0, 30), (1, 30), (12, 30), (30, 30), (450, 500)])
def test_the_interval_of_yes_and_no_is_wilsons(solved, prompts):
    """scipy's takes the normal quantile; its confidence is chosen here so that the quantile is Student's."""
    quantile = scipy.stats.t.ppf(0.975, prompts - 1)
    confidence = 2 * scipy.stats.norm.cdf(quantile) - 1
    wilson = scipy.stats.binomtest(solved, prompts).proportion_ci(confidence, method="wilson")
    shares = [1.0] * solved + [0.0] * (prompts - solved)
    assert share_interval(shares, 0.95) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_the_interval_of_many_prompts_is_that_of_the_central_limit():
    shares = np.random.default_rng(1).binomial(4, 0.4, 20_000) / 4
    normal = scipy.stats.norm.interval(0.9, shares.mean(), shares.std() / np.sqrt(len(shares)))
    assert share_interval(shares, 0.9) == pytest.approx(normal, abs=1e-4)


@pytest.mark.parametrize(("prompts", "samples", "shape"), [(30, 16, (0.4, 0.6)), (30, 1, (2, 2)), (200, 4, (0.3, 2))])
def test_the_interval_holds_the_truth_as_often_as_it_says(prompts, samples, shape):
    """Prompts of different difficulty, drawn anew every time; the truth is the mean over all prompts there could be."""
    random, truth = np.random.default_rng(2), shape[0] / sum(shape)
    held, experiments = 0, 2000
    for _ in range(experiments):
        shares = random.binomial(samples, random.beta(*shape, prompts)) / samples
        low, high = share_interval(shares, 0.9)
        held += low <= truth <= high
    assert 0.88 < held / experiments < 0.94


def test_shares_that_are_all_alike_have_an_interval_too():
    for share in (0.0, 0.5, 1.0):
        low, high = share_interval([share] * 10, 0.95)
        assert 0 <= low <= share <= high <= 1
        assert high - low > 0.2
    assert share_interval([1.0], 0.95) == (0.0, 1.0)


@pytest.mark.parametrize("shares", [[], [0.5, 1.1], [-0.1]])
def test_what_is_no_share_is_refused(shares):
    with pytest.raises(ValueError, match="share"):
        share_interval(shares, 0.95)


def pairs(prompts: int, seed: int, samples: int = 4):
    random = np.random.default_rng(seed)
    return random.integers(0, samples + 1, prompts) / samples, random.integers(0, samples + 1, prompts) / samples


@pytest.mark.parametrize("prompts", [1, 2, 5, 10])
def test_the_test_looks_at_every_change_of_signs(prompts):
    first, second = pairs(prompts, seed=prompts)
    observed = sum(first - second)
    flipped = [sum((first - second) * signs) for signs in product((1, -1), repeat=prompts)]
    extreme = sum(abs(value) >= abs(observed) - 1e-12 for value in flipped)
    assert paired_difference(first, second, 0.95).p_value == pytest.approx(extreme / len(flipped))


@pytest.mark.parametrize("prompts", [8, 12, 60])
def test_the_test_is_scipys(prompts):
    first, second = pairs(prompts, seed=3)
    second = np.minimum(second, first + 0.25)  # a difference that is there
    ours = paired_difference(first, second, 0.95)
    theirs = scipy.stats.permutation_test(
        (first, second), lambda a, b, axis: (a - b).mean(axis=axis), permutation_type="samples", rng=1
    )
    assert ours.difference == pytest.approx(theirs.statistic)
    # From random subsets: four standard deviations of the two p-values.
    spread = 0.0 if prompts <= ENUMERATED else 4 * np.sqrt(2 * theirs.pvalue / 10_000)
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=spread + 1e-12)


@pytest.mark.parametrize(("better", "worse", "same"), [(5, 0, 5), (9, 2, 1), (3, 3, 0)])
def test_for_yes_and_no_the_test_is_mcnemars(better, worse, same):
    first = [1.0] * better + [0.0] * worse + [1.0] * same
    second = [0.0] * better + [1.0] * worse + [1.0] * same
    mcnemar = scipy.stats.binomtest(better, better + worse).pvalue
    assert paired_difference(first, second, 0.95).p_value == pytest.approx(mcnemar)


def test_for_many_yes_and_no_it_is_mcnemars_but_for_the_subsets_drawn():
    first, second = [1.0] * 40 + [0.0] * 20 + [0.0] * 140, [0.0] * 40 + [1.0] * 20 + [0.0] * 140
    mcnemar = scipy.stats.binomtest(40, 60).pvalue
    assert paired_difference(first, second, 0.95).p_value == pytest.approx(mcnemar, rel=0.4)
    assert 0.01 < mcnemar < 0.02


@pytest.mark.parametrize("prompts", [6, 10, 13, 14, 50])
def test_the_interval_holds_the_shifts_that_the_test_does_not_reject(prompts):
    random = np.random.default_rng(prompts)
    second = random.normal(size=prompts)
    first = second + random.normal(0.3, 1, size=prompts)
    found = paired_difference(first, second, 0.9)
    assert found.low <= found.difference <= found.high
    for end, outward in ((found.low, -1), (found.high, 1)):
        inside, outside = end - outward * 1e-6, end + outward * 1e-6
        assert paired_difference(first - inside, second, 0.9).p_value > 0.1
        assert paired_difference(first - outside, second, 0.9).p_value <= 0.1 + 1e-9


def test_test_and_interval_agree_about_nothing():
    for seed in range(60):
        first, second = pairs(12 + seed, seed, samples=2)
        second = np.maximum(0, second - 0.5 * (np.random.default_rng(seed).random(len(second)) < 0.4))
        found = paired_difference(first, second, 0.95)
        assert (found.p_value <= 0.05) == (not found.low <= 0 <= found.high)


def test_the_paired_interval_is_near_students_where_that_holds():
    random = np.random.default_rng(5)
    second = random.normal(size=300)
    first = second + random.normal(0.2, 0.5, size=300)
    student = scipy.stats.ttest_rel(first, second)
    found = paired_difference(first, second, 0.95)
    interval = student.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.005)


def test_a_policy_against_itself_differs_in_nothing():
    values, _ = pairs(100, seed=6)
    found = paired_difference(values, values, 0.95)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_too_few_prompts_to_say_anything():
    found = paired_difference([1.0] * 3, [0.0] * 3, 0.95)
    assert found.p_value == 0.25
    assert (found.low, found.high) == (-np.inf, np.inf)


def test_other_than_pairs_are_refused():
    with pytest.raises(ValueError, match="pairs"):
        paired_difference([1.0], [1.0, 0.0], 0.95)
    with pytest.raises(ValueError, match="pairs"):
        paired_difference([], [], 0.95)
