"""Lengths into rows and rows to ranks, against the definitions."""

from __future__ import annotations

import itertools
import random

import pytest

from rl_tpu.trainer.bins import best_fit_decreasing, deal


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_decreasing_is_near_the_fewest_rows(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 128) for _ in range(200)]
    rows = best_fit_decreasing(lengths, 128)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 128) + 1


@pytest.mark.parametrize("seed", range(10))
def test_hands_are_equal_in_count_and_nearly_in_cost_also_round_by_round(seed):
    draw = random.Random(seed)
    ranks = 2 + seed % 3
    costs = [draw.uniform(0, 100) for _ in range(ranks * 20)]
    hands = deal(costs, ranks)
    assert sorted(index for hand in hands for index in hand) == list(range(len(costs)))
    assert {len(hand) for hand in hands} == {20}
    rounds = list(zip(*([costs[i] for i in hand] for hand in hands), strict=True))
    for earlier, later in itertools.pairwise(rounds):
        assert min(earlier) >= max(later)
    sums = [sum(costs[i] for i in hand) for hand in hands]
    assert max(sums) - min(sums) <= max(max(costs) - min(costs) for costs in rounds)
