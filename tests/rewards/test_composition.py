"""Sums of named parts, rewards of whole groups and rewards by source, through the workers."""

import asyncio

import pytest

from rl_tpu.config.schema import RewardConfig
from rl_tpu.errors import RunError
from rl_tpu.rewards import RewardService
from rl_tpu.tracking import rollout_metrics
from rl_tpu.types import Group, Prompt, Sample, Turn, VersionSpan

MODULE = "composed_rewards"


def samples_of(*texts, finish_reason="stop"):
    return [Sample([1], [1, 2], [1, 1], [0.0, 0.0], [VersionSpan(0, 0, 2)], finish_reason, text=text) for text in texts]


def score(config, *groups):
    """Score (prompt, samples) pairs in one service; the statistics."""
    with RewardService(RewardConfig.model_validate(config)) as service:

        async def run():
            for prompt, samples in groups:
                await service.score(prompt, samples)

        asyncio.run(run())
        return service.take_stats()


PROMPT = Prompt("p", (1,), "4")


def test_weighted_sum_of_named_parts():
    samples = samples_of("<think>a</think><answer>4</answer>", "<answer>4</answer>", "4 4 4 4 4 4")
    config = {
        "parts": [
            {"name": "math", "weight": 2.0, "options": {"answer_format": "tag"}},
            {"name": "format", "weight": 0.5},
            {"name": "repetition", "weight": 0.1, "options": {"words": 2}, "label": "circles"},
            {"name": f"{MODULE}:tokens", "weight": 0.01},
        ]
    }
    stats = score(config, (PROMPT, samples))
    assert [sample.reward_parts for sample in samples] == [
        {"math": 2.0, "format": 0.5, "circles": 0.0, "tokens": 0.02},
        {"math": 2.0, "format": 0.0, "circles": 0.0, "tokens": 0.02},
        {"math": 0.0, "format": 0.0, "circles": pytest.approx(-0.08), "tokens": 0.02},
    ]
    assert [sample.reward for sample in samples] == pytest.approx([2.52, 2.02, -0.06])
    assert stats.scored == 3
    metrics = rollout_metrics([Group(0, PROMPT, samples)], 0)
    assert metrics["reward/format_mean"] == pytest.approx(0.5 / 3)
    assert metrics["reward/circles_mean"] == pytest.approx(-0.08 / 3)


def test_a_part_may_have_parts():
    samples = samples_of("5")
    score({"parts": [{"name": f"{MODULE}:two_parts", "weight": 10}, {"name": f"{MODULE}:number"}]}, (PROMPT, samples))
    assert samples[0].reward_parts == {"one": 10.0, "two": 20.0, "number": 5.0}


def test_one_failing_part_fails_its_sample_alone():
    samples = samples_of("1", "x", "3")
    config = {"parts": [{"name": f"{MODULE}:number"}, {"name": f"{MODULE}:tokens"}], "on_error": "score"}
    stats = score(config | {"failure_reward": -7.0}, (PROMPT, samples))
    assert [sample.reward for sample in samples] == [3.0, -7.0, 5.0]
    assert samples[1].reward_parts == {"failed": -7.0}
    assert f"{MODULE}:number: ValueError: could not convert" in samples[1].reward_error
    assert (stats.scored, stats.errors) == (3, 1)


def test_response_knows_its_length_and_end():
    samples = samples_of("a", finish_reason="length")
    score({"name": f"{MODULE}:tokens"}, (PROMPT, samples))
    assert samples[0].reward == 3.0


def test_group_rewards_see_all_samples_of_a_prompt():
    first, second = samples_of("30", "10", "20"), samples_of("5", "6")
    config = {"parts": [{"name": f"{MODULE}:rank", "options": {"factor": 100}}, {"name": f"{MODULE}:number"}]}
    stats = score(config, (PROMPT, first), (PROMPT, second))
    assert [sample.reward_parts for sample in first] == [
        {"rank": 200.0, "number": 30.0},
        {"rank": 0.0, "number": 10.0},
        {"rank": 100.0, "number": 20.0},
    ]
    assert [sample.reward for sample in second] == [5.0, 106.0]
    assert stats.scored == 5


def test_a_group_reward_may_fail_for_one_sample():
    samples = samples_of("2", "x", "1")
    stats = score({"name": f"{MODULE}:rank", "on_error": "score"}, (PROMPT, samples))
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]
    assert "no rank for 'x'" in samples[1].reward_error
    assert [sample.reward_error for sample in samples[::2]] == [None, None]
    assert stats.errors == 1


@pytest.mark.parametrize(
    ("how", "counted", "message"),
    [
        ("hang", "timeouts", "no reward within 1 s"),
        ("crash", "crashes", "died with exit code 3"),
        ("raise", "errors", "KeyError: 'all'"),
        ("short", "errors", "returned 1 rewards, not a list with one reward for each of 3 responses"),
        ("number", "errors", "returned 1.0, not a list"),
    ],
)
def test_a_failing_group_reward_costs_its_group_alone(how, counted, message):
    bad, good = samples_of(how, "a", "b"), samples_of("fine", "c")
    config = {"name": f"{MODULE}:broken", "timeout_s": 1.0, "on_error": "score", "failure_reward": -1.0}
    stats = score(config, (PROMPT, bad), (PROMPT, good))
    assert [sample.reward for sample in bad + good] == [-1, -1, -1, 1, 1]
    assert all(message in sample.reward_error for sample in bad)
    assert (getattr(stats, counted), stats.scored) == (3, 5)


def test_not_a_number_in_a_group_is_that_samples_error():
    samples = samples_of("nan", "a")
    with pytest.raises(RunError, match=r"prompt 'p': composed_rewards:broken: .*returned nan, not a finite number"):
        score({"name": f"{MODULE}:broken"}, (PROMPT, samples))
    assert score({"name": f"{MODULE}:broken", "on_error": "score"}, (PROMPT, samples)).errors == 1
    assert [sample.reward for sample in samples] == [0.0, 1.0]


class Unreadable:
    """Can be pickled, but not read."""

    def __reduce__(self):
        return int, ("no number",)


def test_a_row_that_cannot_travel_ends_the_run():
    prompt = Prompt("p", (1,), "4", metadata={"row": Unreadable()})
    with pytest.raises(RunError, match="reward workers died of a job before they had it"):
        score({"name": "math"}, (prompt, samples_of("x")))


BY_SOURCE = {
    "by_source": {
        "sums": {"name": "math"},
        "sizes": {"parts": [{"name": f"{MODULE}:tokens"}, {"name": f"{MODULE}:rank"}]},
    }
}


def test_each_source_has_its_reward():
    sums, sizes = samples_of(r"\boxed{4}", "4"), samples_of("2", "1")
    stats = score(
        BY_SOURCE, (Prompt("a", (1,), "4", source="sums"), sums), (Prompt("b", (1,), None, source="sizes"), sizes)
    )
    assert [sample.reward_parts for sample in sums] == [{"math": 1.0}, {"math": 0.0}]
    assert [sample.reward_parts for sample in sizes] == [{"tokens": 2.0, "rank": 1.0}, {"tokens": 2.0, "rank": 0.0}]
    assert stats.scored == 4


def test_the_source_may_be_a_field_of_the_row():
    samples = samples_of(r"\boxed{4}")
    prompt = Prompt("a", (1,), "4", metadata={"extra_info": {"data_source": "sums"}})
    score(BY_SOURCE | {"source_field": "extra_info.data_source"}, (prompt, samples))
    assert samples[0].reward == 1.0


def test_a_source_without_a_reward_ends_the_run_unless_there_is_a_default():
    prompt = Prompt("a", (1,), "4", source="others")
    with pytest.raises(RunError, match=r"prompt 'a' has the source 'others'.*it has: sizes, sums.*'default'"):
        score(BY_SOURCE, (prompt, samples_of("x")))
    samples = samples_of("7")
    score({"by_source": BY_SOURCE["by_source"] | {"default": {"name": f"{MODULE}:number"}}}, (prompt, samples))
    assert samples[0].reward == 7.0


def test_a_reward_that_wants_too_much_memory_is_a_crash():
    samples = samples_of("10", "3000", "20")
    stats = score({"name": f"{MODULE}:greedy", "worker_memory_gb": 1.0}, (PROMPT, samples))
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]
    assert "more memory than reward.worker_memory_gb=1" in samples[1].reward_error
    assert stats.crashes == 1


def test_what_the_environment_gave_for_turns_is_a_part():
    """Of every sample of the group, and alone where no function is wanted."""
    for config, own in ({"name": "exact"}, {"exact": 1.0}), ({"name": "environment"}, {}):
        samples = samples_of("4", "4")
        samples[0].turns = [Turn(0, 1, reward=0.25), Turn(1, 2, reward=-1.0)]
        samples[1].turns = [Turn(0, 2)]
        score(config, (PROMPT, samples))
        assert [sample.reward_parts for sample in samples] == [
            {**own, "environment": -0.75},
            {**own, "environment": 0.0},
        ]
        assert samples[0].reward == sum(own.values()) - 0.75
    samples = samples_of("4")
    samples[0].turns = [Turn(0, 2)]
    score({"name": "exact"}, (PROMPT, samples))
    assert samples[0].reward_parts == {"exact": 1.0}
