"""Every file of configs/reward composes, and what it names exists and takes its options."""

from pathlib import Path

import pytest

from rl_tpu.config.compose import load_config, resource
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.inputs import check_names
from rl_tpu.rewards import make_plan
from rl_tpu.rewards.registry import REWARDS, find_reward

PRESETS = sorted(file.stem for file in resource("configs/reward").glob("*.yaml"))
GUIDE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
REQUIRED = {
    "judge": {"url": "http://localhost/v1", "model": "m"},
    "length": {"free": 1, "limit": 2},
    "regex": {"pattern": "x"},
    "remote": {"url": "http://localhost"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes(preset):
    config = load_config(["+experiment=quickstart", f"reward={preset}"])
    check_names(config)
    assert bool(make_plan(config.reward).terms) == (preset != "environment")  # it has no function


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_reward_is_there_and_documented(name):
    assert callable(find_reward(name, REQUIRED.get(name, {})))
    assert f"\n| `{name}` |" in GUIDE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reward.name=mth"], ["did you mean 'math'", "gsm8k"]),
        (["reward.name=null"], ["reward takes one of name, parts, by_source: none is set"]),
        (["reward=math_with_format", "reward.name=math"], ["name and parts are set"]),
        (["reward=judge", "reward.options.url=localhost"], ["'judge', option url"]),
        (["reward=judge", "+reward.options.key_variable=NO_SUCH_KEY"], ["NO_SUCH_KEY is not set"]),
        (["reward=judge", "+reward.options.template=hm"], ["lacks {response} and {mark}"]),
        (["reward=judge", "+reward.options.verdict='(a)(b)'"], ["one group around the number, it has 2"]),
        (["reward=remote", "reward.options.attempts=0"], ["greater than or equal to 1"]),
        (["reward.name=regex", "+reward.options.pattern='('"], ["no regular expression"]),
        (["reward.name=regex"], ["pattern"]),
        (["reward.name=null", "reward.parts=[{name: math}, {name: math}]"], ["two parts", "'math'", "label"]),
        (["reward.name=null", "reward.parts=[{name: format, options: {tag: x}}]"], ["unexpected keyword", "names"]),
        (["reward=by_source", "reward.by_source.gsm8k.name=null"], ["reward.by_source.gsm8k takes one of name, parts"]),
        (["reward=multiple_choice", "+reward.options.answer_format=box"], ["'multiple_choice', option answer_format"]),
    ],
)
def test_bad_settings_end_in_one_clear_line_before_anything_starts(arguments, words):
    with pytest.raises(UserError) as caught:
        check_names(load_config(["+experiment=quickstart", *arguments]))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
