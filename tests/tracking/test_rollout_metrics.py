import math
import random

import numpy as np
import pytest

from rl_tpu.tracking import rollout_metrics
from rl_tpu.tracking.rollout_metrics import quantile


def test_every_statistic_of_a_batch_worked_out_by_hand(sample, group):
    groups = [
        group(0, [sample(1.0, response=1, parts={"accuracy": 1.0}), sample(1.0, response=3, parts={"accuracy": 1.0})]),
        group(
            1,
            [
                sample(0.0, response=4, versions=((0, 0, 4),), finish="length"),
                sample(1.0, versions=((2, 0, 1), (4, 1, 3))),
            ],
        ),
        group(2, [sample(0.0, error="crashed"), sample(-0.5, prompt=4, parts={"accuracy": 0.0, "overlong": -0.5})]),
        group(3, [sample(0.0, versions=((5, 0, 3),)), sample(0.0, versions=((5, 0, 3),))]),
    ]
    assert rollout_metrics(groups, trained_version=5) == pytest.approx(
        {
            "rollout/prompts": 4,
            "rollout/samples": 8,
            "rollout/total_tokens": (1 + 3 + 4 + 3 * 5) + (7 * 2 + 4),
            "rollout/response_tokens_mean": 23 / 8,
            "rollout/response_tokens_max": 4,
            "rollout/response_tokens_p50": 3,
            "rollout/response_tokens_p90": 4,
            "rollout/response_tokens_p99": 4,
            "rollout/response_tokens_max_to_mean": 4 / (23 / 8),
            "rollout/prompt_tokens_mean": 18 / 8,
            "rollout/cached_prompt_share": 0.0,
            "rollout/truncated_share": 1 / 8,
            "rollout/uniform_group_share": 2 / 4,
            "rollout/solve_all": 1 / 4,
            "rollout/solve_none": 2 / 4,
            "rollout/version_min": 0,
            "rollout/version_max": 5,
            "rollout/mixed_version_share": 1 / 8,
            "rollout/staleness_mean": (5 * 5 + 3 + 0 + 0) / 8,
            "rollout/staleness_max": 5,
            "rollout/token_staleness_mean": (14 * 5 + 1 * 3 + 2 * 1 + 6 * 0) / 23,
            "rollout/token_staleness_max": 5,
            "reward/mean": 2.5 / 8,
            "reward/std": math.sqrt(3.25 / 8 - (2.5 / 8) ** 2),
            "reward/max": 1.0,
            "reward/min": -0.5,
            "reward/error_count": 1,
            "reward/accuracy_mean": 2 / 3,
            "reward/overlong_mean": -0.5,
        }
    )


def test_the_cached_share_is_over_all_prompt_tokens(sample, group):
    read, shared = sample(1.0, prompt=4), sample(0.0, prompt=12)
    shared.cached_prompt_tokens = 10
    assert rollout_metrics([group(0, [read, shared])])["rollout/cached_prompt_share"] == 10 / 16


def test_without_the_trained_version_there_is_no_staleness(sample, group):
    metrics = rollout_metrics([group(0, [sample(1.0)])])
    assert not any("staleness" in name for name in metrics)


def test_tokens_that_the_policy_did_not_write_have_no_staleness(sample, group):
    answer = sample(1.0, response=4, versions=((2, 0, 1), (3, 1, 4)))
    answer.loss_mask[:2] = [0, 0]
    metrics = rollout_metrics([group(0, [answer])], trained_version=5)
    assert (metrics["rollout/token_staleness_mean"], metrics["rollout/token_staleness_max"]) == (2, 2)
    assert metrics["rollout/staleness_max"] == 3
    answer.loss_mask[:] = [0] * 4
    assert "rollout/token_staleness_mean" not in rollout_metrics([group(0, [answer])], trained_version=5)


def test_quantiles_are_those_of_numpys_inverted_distribution():
    dice = random.Random(0)
    for size in range(1, 40):
        values = [dice.randrange(20) for _ in range(size)]
        for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
            assert quantile(values, share) == np.quantile(values, share, method="inverted_cdf")


def test_an_empty_batch_and_a_reward_that_is_no_number(sample, group):
    assert rollout_metrics([]) == {"rollout/prompts": 0, "rollout/samples": 0}
    metrics = rollout_metrics([group(0, [sample(math.nan), sample(1.0)])])
    assert math.isnan(metrics["reward/mean"])
    assert math.isnan(metrics["reward/std"])
    assert metrics["rollout/uniform_group_share"] == 0
