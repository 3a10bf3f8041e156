"""Advantages against plain loops and closed forms."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import twins

from rl_tpu.algorithms.advantages import EPSILON, advantages

BASELINES = ["group_mean", "leave_one_out", "batch_mean", "none"]
SCALES = ["none", "group_std", "group_std_population", "batch_std"]
OF_GROUP = ["group_mean", "leave_one_out"]
every_kind = pytest.mark.parametrize(("baseline", "scale"), list(itertools.product(BASELINES, SCALES)))


def random_groups(seed: int, bad: float = 0.0) -> list[list[float]]:
    """Groups of 1 to 9, every third of equal rewards, some rewards no finite numbers."""
    draw = random.Random(seed)
    groups = []
    for number in range(draw.randint(1, 7)):
        size = draw.randint(1, 9)
        rewards = [draw.choice([0.0, 1.0, draw.gauss(0, 3)]) for _ in range(size)]
        if number % 3 == 2:
            rewards = [rewards[0]] * size
        groups.append([draw.choice([math.nan, math.inf, -math.inf]) if draw.random() < bad else r for r in rewards])
    return groups


@every_kind
@pytest.mark.parametrize("bad", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(10))
def test_against_the_twin(baseline, scale, bad, seed):
    groups = random_groups(seed, bad)
    found, expected = advantages(groups, baseline, scale), twins.advantages(groups, baseline, scale)
    assert [len(own) for own in found] == [len(group) for group in groups]
    for own, twin in zip(found, expected, strict=True):
        assert own == pytest.approx(twin, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_grpo_against_torch(seed):
    draw = random.Random(seed)
    rewards = [draw.gauss(0, 1) for _ in range(8)]
    r = torch.tensor(rewards, dtype=torch.float64)
    centred = r - r.mean()
    for scale, expected in (
        ("none", centred),
        ("group_std", centred / (r.std(unbiased=True) + 1e-6)),
        ("group_std_population", centred / (r.std(unbiased=False) + 1e-6)),
    ):
        found = torch.tensor(advantages([rewards], "group_mean", scale)[0], dtype=torch.float64)
        torch.testing.assert_close(found, expected)


def test_closed_form_of_one_right_answer():
    """[1, 0, 0, 0]: mean 1/4, unbiased deviation 1/2."""
    assert advantages([[1, 0, 0, 0]], "group_mean", "none") == [[0.75, -0.25, -0.25, -0.25]]
    expected = [0.75 / (0.5 + EPSILON), *[-0.25 / (0.5 + EPSILON)] * 3]
    assert advantages([[1, 0, 0, 0]], "group_mean", "group_std")[0] == pytest.approx(expected, abs=1e-12)
    assert advantages([[1, 0, 0, 0]], "leave_one_out", "none")[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages([[1, 0], [1, 1]], "batch_mean", "none") == [[0.25, -0.75], [0.25, 0.25]]
    assert advantages([[1, 0], [3, -2]], "none", "none") == [[1, 0], [3, -2]]


@every_kind
@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_one_sample_that_differs_never_explodes(baseline, scale, size):
    """The deviation of the others of a lone right answer is 0: a leave-one-out deviation would divide by 1e-6."""
    for rewards in ([1.0] + [0.0] * (size - 1), [0.0] + [1.0] * (size - 1)):
        found = advantages([rewards], baseline, scale)[0]
        assert all(math.isfinite(advantage) for advantage in found)
        bound = 10 if size <= 16 else math.sqrt(size) + 1
        assert max(abs(advantage) for advantage in found) < bound


@pytest.mark.parametrize("seed", range(20))
def test_advantages_over_a_groups_deviation_are_bounded_by_its_size(seed):
    draw = random.Random(seed)
    n = draw.randint(2, 12)
    rewards = [draw.choice([0.0, 0.0, 1.0, draw.gauss(0, 5)]) for _ in range(n)]
    for baseline, bound in (("group_mean", (n - 1) / math.sqrt(n)), ("leave_one_out", math.sqrt(n))):
        assert max(map(abs, advantages([rewards], baseline, "group_std")[0])) <= bound + 1e-9


@pytest.mark.parametrize("baseline", OF_GROUP)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3])
def test_equal_rewards_teach_exactly_nothing(baseline, scale, value):
    found = advantages([[value] * 7, [0.0, 1.0]], baseline, scale)
    assert found[0] == [0.0] * 7
    assert found[1] != [0.0, 0.0]


@every_kind
def test_a_batch_of_equal_rewards_has_no_advantages_but_without_a_baseline(baseline, scale):
    found = advantages([[0.3] * 3, [0.3] * 4], baseline, scale)
    if baseline == "none" and scale in ("none", "batch_std"):
        divisor = EPSILON if scale == "batch_std" else 1.0
        assert found == [[0.3 / divisor] * 3, [0.3 / divisor] * 4]
    else:
        assert found == [[0.0] * 3, [0.0] * 4]


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_has_no_advantage_over_itself(scale):
    for baseline in OF_GROUP:
        assert advantages([[3.0], [1.0, 0.0]], baseline, scale)[0] == [0.0]


def test_a_group_of_one_is_a_sample_like_any_other_of_the_batch():
    assert advantages([[3.0], [1.0], [2.0]], "batch_mean", "none") == [[1.0], [-1.0], [0.0]]
    normalised = [own[0] for own in advantages([[3.0], [1.0], [2.0]], "batch_mean", "batch_std")]
    assert normalised == pytest.approx([1 / (math.sqrt(2 / 3) + EPSILON), -1 / (math.sqrt(2 / 3) + EPSILON), 0.0])
    assert advantages([[3.0], [1.0], [2.0]], "batch_mean", "group_std") == [[0.0], [0.0], [0.0]]


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_leaves_the_others_alone(baseline, scale, bad):
    with_it, without = [[bad, 1, 0], [2, bad, 5, 1]], [[1, 0], [2, 5, 1]]
    found, expected = advantages(with_it, baseline, scale), advantages(without, baseline, scale)
    assert found == [[0.0, *expected[0]], [expected[1][0], 0.0, *expected[1][1:]]]
    assert advantages([[bad], [bad, bad], []], baseline, scale) == [[0.0], [0.0, 0.0], []]


@every_kind
@pytest.mark.parametrize("size", [1e160, 1e308])
def test_huge_rewards_do_not_overflow(baseline, scale, size):
    found = advantages([[size, size / 2, 0.0], [1.0, 0.0]], baseline, scale)
    assert all(math.isfinite(advantage) for own in found for advantage in own)


@pytest.mark.parametrize("baseline", OF_GROUP)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_of_a_group_add_up_to_nothing_and_keep_its_order_whatever_is_added(baseline, scale):
    rewards = [0.1, 0.7, 0.3, 2.5, -1.0]
    found = advantages([rewards], baseline, scale)[0]
    assert math.fsum(found) == pytest.approx(0, abs=1e-12)
    shifted = advantages([[reward + 5 for reward in rewards]], baseline, scale)[0]
    assert shifted == pytest.approx(found, abs=1e-9)
    assert sorted(range(5), key=rewards.__getitem__) == sorted(range(5), key=found.__getitem__)


def test_normalised_over_the_batch_they_have_mean_0_and_deviation_1():
    found = [a for own in advantages(random_groups(4), "batch_mean", "batch_std") for a in own]
    assert twins.mean(found) == pytest.approx(0, abs=1e-12)
    assert twins.deviation(found, 0) == pytest.approx(1, abs=1e-5)


def test_no_groups_no_advantages():
    assert advantages([], "batch_mean", "batch_std") == []


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="unknown baseline 'mean'"):
        advantages([[1, 0]], "mean", "none")
    with pytest.raises(ValueError, match="unknown scale 'std'"):
        advantages([[1, 0]], "group_mean", "std")
