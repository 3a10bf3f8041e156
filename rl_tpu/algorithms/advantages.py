"""From the rewards of a batch to advantages: reward minus a baseline, divided by a scale."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from rl_tpu.algorithms.filters import is_uniform

EPSILON = 1e-6
"""Added to a standard deviation."""

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["none", "group_std", "group_std_population", "batch_std"]


def advantages(groups: Sequence[Sequence[float]], baseline: Baseline, scale: Scale) -> list[list[float]]:
    """One advantage per sample of a batch, from the rewards of its groups (of any sizes).

    Baseline:
    group_mean     the mean of the group (GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783)
    leave_one_out  the mean of the others in the group (RLOO, arXiv 2402.14740)
    batch_mean     the mean of the batch (REINFORCE++, arXiv 2501.03262)
    none           0

    Scale, each standard deviation + 1e-6:
    none                  1
    group_std             of the group's rewards, divisor n - 1
    group_std_population  of the group's rewards, divisor n
    batch_std             of the batch's rewards minus baselines, divisor n

    A deviation always includes the sample itself, with leave_one_out too: in [1, 0, 0, 0] the others of the first sample
    do not deviate at all, and its advantage would be without bound. So an advantage over group_std is at most
    (n - 1) / sqrt(n) with group_mean and sqrt(n) with leave_one_out.

    Equal rewards, and a group of one, get exactly 0 where baseline or scale is the group's; without either a group of
    one is a sample like any other. A reward that is not finite gets 0 and stays out of all statistics.
    """
    batch_mean = _mean([reward for group in groups for reward in _finite(group)]) if baseline == "batch_mean" else 0.0
    differences = [_minus_baseline(group, baseline, batch_mean) for group in groups]
    batch_std = 0.0
    if scale == "batch_std":
        pairs = zip(itertools.chain(*groups), itertools.chain(*differences), strict=True)
        counted = [difference for reward, difference in pairs if math.isfinite(reward)]
        batch_std = _deviation(counted, len(counted))
    divisors = [_divisor(group, scale, batch_std) for group in groups]
    return [[difference / divisor for difference in own] for own, divisor in zip(differences, divisors, strict=True)]


def _minus_baseline(group: Sequence[float], baseline: str, batch_mean: float) -> list[float]:
    finite, stretch = _finite(group), 1.0
    if baseline == "none":
        mean = 0.0
    elif baseline == "batch_mean":
        mean = batch_mean
    elif baseline == "group_mean":
        mean = _mean(finite)
    elif baseline == "leave_one_out":
        mean = _mean(finite)
        stretch = len(finite) / max(1, len(finite) - 1)  # reward - mean of the others = (reward - mean) * n / (n - 1)
    else:
        raise ValueError(f"unknown baseline {baseline!r}")
    return [(reward - mean) * stretch if math.isfinite(reward) else 0.0 for reward in group]


def _divisor(group: Sequence[float], scale: str, batch_std: float) -> float:
    """What the differences of a group are divided by; infinity where the group has no deviation to measure them with."""
    if scale == "none":
        return 1.0
    if scale == "batch_std":
        return batch_std + EPSILON
    if scale not in ("group_std", "group_std_population"):
        raise ValueError(f"unknown scale {scale!r}")
    finite = _finite(group)
    if is_uniform(finite):
        return math.inf
    return _deviation(finite, len(finite) - (scale == "group_std")) + EPSILON


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    """The mean; of equal values exactly that value."""
    if is_uniform(values):
        return values[0] if values else 0.0
    return math.fsum(value / len(values) for value in values)


def _deviation(values: Sequence[float], divisor: int) -> float:
    mean = _mean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(max(1, divisor))
