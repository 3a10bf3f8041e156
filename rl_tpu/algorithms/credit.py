"""Which reward a turn is credited with, in samples of several turns."""

from __future__ import annotations

from collections.abc import Sequence

from rl_tpu.algorithms.advantages import Baseline, Scale, advantages


def returns_to_go(reward: float, turn_rewards: Sequence[float]) -> list[float]:
    """Per turn of a sample: its whole reward, which includes those of its turns, less what earlier turns had earned."""
    returns, earned = [], 0.0
    for given in turn_rewards:
        returns.append(reward - earned)
        earned += given
    return returns


def turn_advantages(
    groups: Sequence[Sequence[Sequence[float]]], baseline: Baseline, scale: Scale
) -> list[list[list[float]]]:
    """One advantage per turn, from the returns of a batch: groups of samples of turns, all of any size.

    A turn is compared, as `advantages` says, with the same turn of the group's other samples that have it. Samples of one
    turn therefore get exactly what `advantages` gives them; a turn that no other sample has gets 0 where baseline or scale
    is the group's.
    """
    result = [[[0.0] * len(sample) for sample in group] for group in groups]
    longest = max((len(sample) for group in groups for sample in group), default=0)
    for turn in range(longest):
        having = [[number for number, sample in enumerate(group) if len(sample) > turn] for group in groups]
        of_turn = advantages(
            [[group[number][turn] for number in numbers] for group, numbers in zip(groups, having, strict=True)],
            baseline,
            scale,
        )
        for target, numbers, values in zip(result, having, of_turn, strict=True):
            for number, value in zip(numbers, values, strict=True):
                target[number][turn] = value
    return result
