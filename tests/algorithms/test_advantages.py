"""Advantages, filter and overlong penalty against closed forms and a tensor twin."""

import math
import random

import pytest
import torch

from rl_tpu.algorithms.advantages import EPSILON, group_advantages
from rl_tpu.algorithms.filters import is_uniform
from rl_tpu.algorithms.overlong import soft_overlong_penalty


@pytest.mark.parametrize("seed", range(20))
def test_against_torch(seed):
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in range(rng.randint(2, 16))]
    r = torch.tensor(rewards, dtype=torch.float64)
    expected_mean = r - r.mean()
    expected_std = expected_mean / (r.std(unbiased=True) + 1e-6)
    assert torch.allclose(torch.tensor(group_advantages(rewards, "group_mean"), dtype=torch.float64), expected_mean)
    assert torch.allclose(torch.tensor(group_advantages(rewards, "group_std"), dtype=torch.float64), expected_std)


def test_closed_form_of_one_right_answer():
    """[1, 0, 0, 0]: mean 1/4, unbiased deviation 1/2. A leave-one-out deviation would be 0 for the first sample."""
    expected = [0.75 / (0.5 + EPSILON), *[-0.25 / (0.5 + EPSILON)] * 3]
    found = group_advantages([1, 0, 0, 0], "group_std")
    assert found == pytest.approx(expected, abs=1e-12)
    assert all(abs(advantage) < 10 for advantage in found)
    assert group_advantages([1, 0, 0, 0], "group_mean") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_invariants(kind):
    rewards = [0.1, 0.7, 0.3, 2.5, -1.0]
    advantages = group_advantages(rewards, kind)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-12)
    shifted = group_advantages([reward + 5 for reward in rewards], kind)
    assert shifted == pytest.approx(advantages, abs=1e-9)
    order = sorted(range(5), key=lambda i: rewards[i])
    assert order == sorted(range(5), key=lambda i: advantages[i])


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3])
def test_equal_rewards_teach_exactly_nothing(kind, value):
    assert group_advantages([value] * 7, kind) == [0.0] * 7
    assert is_uniform([value] * 7)


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_leaves_the_others_alone(kind, bad):
    assert group_advantages([bad, 1, 0], kind) == [0.0, *group_advantages([1, 0], kind)]
    assert group_advantages([bad, 1], kind) == [0.0, 0.0]
    assert group_advantages([bad, bad], kind) == [0.0, 0.0]


def test_uniform():
    assert is_uniform([])
    assert is_uniform([1.0])
    assert is_uniform([math.nan, 1.0, 1.0])
    assert not is_uniform([0.0, 1.0])
    assert not is_uniform([math.nan, 0.0, 1.0])
    assert not is_uniform([0.5, 0.5 - 1e-3])


def test_single_sample_has_no_advantage():
    assert group_advantages([3.0], "group_std") == [0.0]


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
