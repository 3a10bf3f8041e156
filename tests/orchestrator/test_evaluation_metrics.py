"""What a set of answers comes to, against counts made by hand, and what makes two evaluations comparable."""

from __future__ import annotations

import json
from itertools import combinations
from statistics import fmean

import pytest
import scipy.stats

from rl_tpu.errors import UserError
from rl_tpu.orchestrator.comparison import check_comparable, compare
from rl_tpu.orchestrator.evaluation_metrics import evaluation_metrics, prompt_scores
from rl_tpu.types import Group, Prompt, Sample, VersionSpan


def sample(text: str, reward: float, tokens: int = 3, finish: str = "stop", error: str | None = None) -> Sample:
    spans = [VersionSpan(0, 0, tokens)]
    ids = list(range(tokens))
    return Sample([1], ids, [1] * tokens, [-0.5] * tokens, spans, finish, text, reward, reward_error=error)


def group(name: str, *samples: Sample) -> Group:
    return Group(0, Prompt(name, (1,), "4"), list(samples))


GROUPS = [
    group(
        "a",
        sample(r"so \boxed{4}", 1.0, 3),
        sample("<answer>4.0</answer>", 1.0, 5),
        sample("<think>4</think> Answer: 5", 0.0, 7),
        sample("no idea", 0.0, 100, "length"),
    ),
    group("b", *(sample("5", 0.25, 10, error="boom" if n == 0 else None) for n in range(4))),
]


def metrics(groups: list[Group]) -> dict[str, float]:
    return evaluation_metrics(groups, [prompt_scores(each) for each in groups], 0.95)


def test_metrics_of_two_prompts():
    found = metrics(GROUPS)
    solved = [[1, 1, 0, 0], [0, 0, 0, 0]]
    for k in (1, 2, 4):
        assert found[f"pass@{k}"] == fmean(fmean(any(s) for s in combinations(each, k)) for each in solved)
    assert found["mean@4"] == 2 / 8
    assert found["maj@4"] == 0.5  # 4 and 4.0 are one answer, and outvote the others
    assert found["reward_mean"] == (2 + 4 * 0.25) / 8
    assert 0 <= found["pass@1_low"] < 0.25 < found["pass@1_high"] <= 1
    assert found["response_tokens_mean"] == (115 + 40) / 8
    assert (found["response_tokens_p50"], found["response_tokens_max"]) == (10, 100)
    assert found["response_tokens_p90"] == pytest.approx(10 + 0.3 * 90)  # linear, as numpy does it
    assert (found["truncated_share"], found["reward_error_count"]) == (1 / 8, 1.0)


def test_a_number_of_samples_that_is_no_power_of_two_and_a_single_one():
    three = metrics([group("a", *(sample(str(n), float(n == 0)) for n in range(3)))])
    assert [name for name in three if name.startswith("pass@1") or "@3" in name or "@2" in name] == [
        "pass@1",
        "pass@2",
        "pass@3",
        "maj@3",
        "mean@3",
        "pass@1_low",
        "pass@1_high",
    ]
    assert three["maj@3"] == pytest.approx(1 / 3)
    one = metrics([group("a", sample("4", 1.0)), group("b", sample("5", 0.0))])
    assert [name for name in one if "@" in name] == ["pass@1", "pass@1_low", "pass@1_high"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["4", "4", "5"], 1.0),  # a bare answer is all of the text
        (["4", "5"], 0.5),
        (["", "", "4"], 1.0),  # who says nothing does not vote
        (["<think>hm", "<think>hm", "4"], 1.0),
        (["", ""], 0.0),
        ([r"\boxed{\frac12}", r"$\boxed{\frac12}$", r"\boxed{3}", "4"], 0.0),
    ],
)
def test_who_votes_for_what(texts, expected):
    scores = prompt_scores(group("a", *(sample(text, float(text == "4")) for text in texts)))
    assert scores[f"maj@{len(texts)}"] == expected


def report(rewards: dict[str, list[float]]) -> dict:
    scores = {name: prompt_scores(group(name, *(sample("4", r) for r in each))) for name, each in rewards.items()}
    return {"scores": {"sums": scores}}


def test_two_policies_are_compared_prompt_by_prompt():
    first = report({str(n): [1.0, 1.0] for n in range(10)} | {"x": [0.0, 0.0]})
    second = report({"x": [0.0, 1.0]} | {str(n): [0.0, 0.0] for n in range(10)})
    found = compare(first, json.loads(json.dumps(second)), 0.95)["sums"]
    values = found["metrics"]["pass@1"]
    assert values["checkpoint"] == pytest.approx(10 / 11)
    assert values["compare"] == pytest.approx(0.5 / 11)
    theirs = scipy.stats.permutation_test(
        ([1.0] * 10 + [0.0], [0.0] * 10 + [0.5]),
        lambda a, b: fmean(a - b),
        permutation_type="samples",
        vectorized=False,
    )
    assert values["difference"] == pytest.approx(theirs.statistic)
    assert values["p_value"] == pytest.approx(theirs.pvalue)
    assert found["verdict"].startswith("checkpoint is better than compare (pass@1 differs by +0.864, 0.95 interval +0.")
    assert compare(second, first, 0.95)["sums"]["verdict"].startswith("checkpoint is worse than compare (pass@1")
    assert compare(first, first, 0.95)["sums"]["verdict"].startswith("no difference at confidence 0.95")


def test_where_nothing_is_ever_solved_the_reward_decides():
    first, second = (report({str(n): [reward] for n in range(12)}) for reward in (0.75, 0.5))
    found = compare(first, second, 0.95)["sums"]
    assert found["verdict"].startswith("checkpoint is better than compare (reward_mean differs by +0.25")


SETTINGS = {"evaluation.sets.sums": {"temperature": 1.0, "prompts": "ab"}, "reward": {"name": "math"}}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"evaluation.sets.sums": {"temperature": 0.5, "prompts": "ab"}}, "sums.temperature is 0.5 there and 1.0 here"),
        ({"evaluation.sets.sums": {"temperature": 1.0, "prompts": "cd"}}, "sums has other prompts there"),
        ({"reward": {"name": "exact"}}, "reward.name is 'exact' there and 'math' here"),
        ({"evaluation.sets.own": {}}, "evaluation.sets.own is only there"),
    ],
)
def test_what_cannot_be_compared(theirs, words):
    check_comparable(SETTINGS, dict(SETTINGS), "other.json")
    with pytest.raises(UserError, match=f"compare=other.json cannot be compared: .*{words}"):
        check_comparable(SETTINGS, SETTINGS | theirs, "other.json")
    with pytest.raises(UserError, match="sums is not there"):
        check_comparable(SETTINGS, {"reward": {"name": "math"}}, "other.json")
