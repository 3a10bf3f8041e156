"""Which groups teach something."""

from __future__ import annotations

import math

from rl_tpu.algorithms.advantages import advantages
from rl_tpu.algorithms.filters import is_uniform


def test_uniform():
    assert is_uniform([])
    assert is_uniform([1.0])
    assert is_uniform([0.1] * 7)
    assert is_uniform([math.nan, 1.0, 1.0])
    assert not is_uniform([0.0, 1.0])
    assert not is_uniform([math.nan, 0.0, 1.0])
    assert not is_uniform([0.5, 0.5 - 1e-3])


def test_groups_that_are_dropped_are_those_without_an_advantage():
    for rewards in ([1, 1, 1], [1, 0, 1], [math.nan, 1], [math.inf, 1, 2], [0.5]):
        dropped = is_uniform(rewards)
        for scale in ("none", "group_std", "group_std_population"):
            assert dropped == (not any(advantages([rewards], "group_mean", scale)[0]))
