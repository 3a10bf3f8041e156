from itertools import combinations
from statistics import fmean

import pytest

from rl_tpu.algorithms.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_is_the_share_of_subsets_that_hold_a_right_sample(n):
    for c in range(n + 1):
        right = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            brute_force = fmean(any(subset) for subset in combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(brute_force, abs=1e-15)


def test_extremes_are_exact_and_large_counts_do_not_overflow():
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(16, 5, 1) == 5 / 16
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)
