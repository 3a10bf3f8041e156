"""How sure one can be of a mean over prompts, and of the difference between two policies on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import stdtrit

ENUMERATED = 13
"""Up to so many prompts all subsets are looked at, beyond it random ones."""
SUBSETS = 9_999
SUBSETS_AT_ONCE = 2**22
"""Entries of the matrix of subsets that is in memory at a time."""


def share_interval(shares: Sequence[float], confidence: float) -> tuple[float, float]:
    """Confidence interval of the mean of ``shares``, each in [0, 1], one per prompt: for any prompt of that kind.

    Wilson's score interval with the number of prompts in its effective size: as many yes-or-no prompts as would leave the
    mean equally uncertain (Dean and Pagano 2015, Evaluating Confidence Interval Methods for Binomial Proportions in
    Clustered Surveys). It has a width also where every share is 0, or 1, and for shares of 0 and 1 alone it is
    Wilson's own, with Student's quantile for the normal one.

    Raises ValueError for no shares, or one outside [0, 1].
    """
    values = np.asarray(shares, dtype=np.float64)
    if not len(values) or values.min() < 0 or values.max() > 1:
        raise ValueError("an interval needs at least one share, and all within [0, 1]")
    if len(values) == 1:
        return 0.0, 1.0
    mean = float(values.mean())
    spread = float(values.var())
    # Shares that are all alike say nothing about how much prompts differ: they count as prompts of yes or no.
    size = len(values) * (mean * (1 - mean) / spread if spread > 1e-12 else 1.0)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    weight = quantile**2 / size
    centre = (mean + weight / 2) / (1 + weight)
    half = quantile / (1 + weight) * sqrt(mean * (1 - mean) / size + weight / (4 * size))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference over prompts, its confidence interval, and the p-value of "there is none" (two-sided)."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float) -> PairedDifference:
    """What ``first`` is more than ``second``, value by value: both are of the same prompts in the same order.

    The test is the permutation test of pairs: had the policies been equal, every difference might as well have the other
    sign. For values of 0 and 1 it is McNemar's exact test. Its interval holds the shifts that it would not reject, which
    are those between two quantiles of the means of all subsets of the differences (Hartigan 1969, Using Subsample Values as
    Typical Values): test and interval never contradict each other. All subsets of up to `ENUMERATED` prompts,
    else `SUBSETS` random ones, always the same.

    Raises ValueError for no values or a different number of them.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"pairs needed, got {len(first)} and {len(second)} values")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    sums, sizes = _subset_sums(differences)
    # Changing the signs of a subset leaves a sum at least as large as the observed one if the subset's own is no more
    # than 0. The empty subset, which is not among the sums, is the observation itself.
    rounding = 1e-9 * float(np.abs(differences).max())
    total = len(sums) + 1
    above = (1 + int((sums <= rounding).sum())) / total
    below = (1 + int((sums >= -rounding).sum())) / total
    means = np.sort(sums / sizes)
    cut = int((1 - confidence) / 2 * total + 1e-9)
    low, high = (means[cut - 1], means[-cut]) if cut else (-np.inf, np.inf)
    return PairedDifference(float(differences.mean()), float(low), float(high), min(1.0, 2 * min(above, below)))


def _subset_sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and sizes of subsets of the values that are not empty."""
    count = len(values)
    if count <= ENUMERATED:
        numbers = np.arange(1, 2**count)
        chosen = (numbers[:, None] >> np.arange(count) & 1).astype(np.float64)
        return chosen @ values, chosen.sum(1)
    random, parts = np.random.default_rng(0), []
    step = max(1, SUBSETS_AT_ONCE // count)
    for start in range(0, SUBSETS, step):
        chosen = random.integers(0, 2, (min(step, SUBSETS - start), count), dtype=np.int8)
        parts.append((chosen @ values, chosen.sum(1, dtype=np.int64)))
    sums, sizes = (np.concatenate(each) for each in zip(*parts, strict=True))
    return sums[sizes > 0], sizes[sizes > 0]
