"""The soft overlong penalty against the paper's numbers and cases."""

from __future__ import annotations

import pytest

from rl_tpu.algorithms.overlong import soft_overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_penalty_of_the_paper(tokens, expected):
    """DAPO section 3.4: 16384 tokens are free, the next 4096 are the soft buffer, 20480 the most."""
    assert soft_overlong_penalty(tokens, 20480, 4096) == pytest.approx(expected, abs=1e-12)
    assert soft_overlong_penalty(tokens, 20480, 4096, factor=0.5) == pytest.approx(expected / 2, abs=1e-12)


def test_overlong_penalty_equals_the_three_cases_of_equation_13():
    l_max, l_cache = 50, 13
    for length in range(80):
        if length <= l_max - l_cache:
            expected = 0
        elif length <= l_max:
            expected = ((l_max - l_cache) - length) / l_cache
        else:
            expected = -1
        assert soft_overlong_penalty(length, l_max, l_cache) == pytest.approx(expected, abs=1e-12)


def test_no_buffer_no_penalty():
    assert soft_overlong_penalty(100, 100, 0) == 0.0
