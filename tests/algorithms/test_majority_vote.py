from itertools import product
from statistics import fmean

import pytest

from rl_tpu.algorithms.majority_vote import majority_solved

ANSWERS = ("4", "5", "6", None)


@pytest.mark.parametrize("n", range(1, 6))
def test_is_the_chance_that_a_most_frequent_answer_is_right(n):
    """Every way in which n samples can answer: the winners of all tie-breaks, one by one."""
    for answers in product(ANSWERS, repeat=n):
        given = [answer for answer in answers if answer is not None]
        winners = [answer for answer in set(given) if all(given.count(answer) >= given.count(other) for other in given)]
        expected = fmean(answer == "4" for answer in winners) if winners else 0.0
        assert majority_solved(answers, [answer == "4" for answer in answers]) == pytest.approx(expected)


def test_samples_with_one_answer_may_be_graded_differently():
    assert majority_solved(["4", "4", "4", "4", "5"], [True, True, True, False, False]) == 0.75
