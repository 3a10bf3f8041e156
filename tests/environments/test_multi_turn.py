"""Conversations with any function: replies, rewards, budgets, and functions that fail."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_templates import CHATML, make_tokenizer
from scripted import Script, encode, prompt, turn

from rl_tpu.config.schema import EnvironmentConfig, RewardConfig
from rl_tpu.environments import make_environment
from rl_tpu.errors import RunError, UserError
from rl_tpu.rewards import RewardService
from rl_tpu.types import SamplingParams

TOKENIZER = make_tokenizer(CHATML)
PROMPT = prompt(TOKENIZER, "Which number?")
OPENING = "<|im_start|>assistant\n"


def make(reply, **options):
    options = {"reply": f"replies:{reply}", **options}
    return make_environment(EnvironmentConfig(name="multi_turn", options=options), TOKENIZER)


def play(environment, *texts, n=1, tokens=1000, script=None, **params):
    script = script or Script(*(text if not isinstance(text, str) else turn(TOKENIZER, text) for text in texts))
    params = SamplingParams(max_response_tokens=tokens, **params)
    samples = asyncio.run(environment.run(PROMPT, n, params, script))
    for sample in samples:
        lengths = {len(sample.response_ids), len(sample.loss_mask), len(sample.logprobs)}
        assert lengths == {sample.turns[-1].end} or sample.loss_mask[-1] == 0
        assert len(sample.response_ids) <= tokens
        assert [i for each in sample.turns for i in range(each.start, each.end)] == [
            i for i, mask in enumerate(sample.loss_mask) if mask
        ]
    return samples, script


def test_turns_continue_exactly_what_was_sampled_and_earn_their_own_rewards():
    [sample], script = play(make("guess", reply_options={"bonus": 0.5}), "3", "9", "5")
    words = [
        TOKENIZER.decode(ids, skip_special_tokens=False)
        for ids in (call[0][len(before[0]) :] for before, call in zip(script.calls, script.calls[1:], strict=False))
    ]
    assert words == [
        f"3<|im_end|>\n<|im_start|>user\nHigher.<|im_end|>\n{OPENING}",
        f"9<|im_end|>\n<|im_start|>user\nLower.<|im_end|>\n{OPENING}",
    ]
    assert [each.reward for each in sample.turns] == [-0.2, -0.4, 1.5]
    assert sample.finish_reason == "stop"
    assert sample.text == "5"
    masked = sum(mask == 0 for mask in sample.loss_mask)
    counted = {name: value for name, value in sample.measures.items() if name != "seconds"}
    assert counted == {
        "turns": 3,
        "tokens": masked,
        "over_tokens": 0,
        "over_turns": 0,
        "over_time": 0,
        "failed": 0,
        "template_mismatch": 0,
    }
    with RewardService(RewardConfig(name="environment")) as rewards:
        asyncio.run(rewards.score(PROMPT, [sample]))
    assert sample.reward == pytest.approx(0.9)


def test_every_kind_of_reply():
    [sample], script = play(make("two_voices"), "a", "b")
    assert TOKENIZER.decode(script.calls[1][0]).endswith(
        f"a<|im_end|>\n<|im_start|>user\nOne.<|im_end|>\n<|im_start|>user\nTwo.<|im_end|>\n{OPENING}"
    )
    assert (sample.text, sample.finish_reason, sample.measures["turns"]) == ("b", "stop", 2)
    [sample], script = play(make("once", reward_text="whole"), "a", "b")
    assert sample.text == "a\nuser\nReally?\nassistant\nb"
    [sample], _ = play(make("again", max_turns=2), "a", "b")
    assert TOKENIZER.decode(sample.response_ids).count("Not a.") == 1


def test_samples_of_a_prompt_share_one_first_request_and_have_their_own_seeds():
    [one, two], script = play(make("once"), "a", "b", "c", "d", n=2, seed=7)
    assert [(n, params.seed) for _, params, n in script.calls] == [(2, 7), (1, 7), (1, 8)]
    assert [one.text, two.text] == ["c", "d"]


def test_budget_of_turns():
    [sample], script = play(make("again", max_turns=2), "a", "b", "c")
    assert (sample.finish_reason, sample.measures["over_turns"], sample.measures["turns"]) == ("turns", 1, 2)
    assert len(script.calls) == 2
    assert sample.loss_mask[-1] == 1


def test_budget_of_tokens_of_a_turn():
    [sample], script = play(make("again", max_turn_tokens=4), "ab", "abcdef")
    assert [params.max_response_tokens for _, params, _ in script.calls] == [4, 4]
    assert (sample.finish_reason, sample.measures["over_tokens"], sample.text) == ("length", 1, "abcd")


def test_budget_of_all_tokens_counts_what_the_environment_said():
    said = len(encode(TOKENIZER, f"\n<|im_start|>user\nNot ab.<|im_end|>\n{OPENING}"))
    for left, turns in ((0, 1), (1, 2), (2, 2)):
        [sample], script = play(make("again"), "ab", "abcdef", tokens=3 + said + left)
        assert len(script.calls) == turns
        assert (sample.finish_reason, sample.measures["over_tokens"]) == ("length", 1)
        assert len(sample.response_ids) == (3 if left == 0 else 3 + said + left)
        assert sample.loss_mask[-1] == 1


def test_budget_of_time_cuts_off_a_later_turn_but_not_the_first():
    class Slow(Script):
        async def __call__(self, ids, params, n):
            answers = await super().__call__(ids, params, n)
            await asyncio.sleep(0.3 if len(self.calls) == 1 else 20)
            return answers

    script = Slow(turn(TOKENIZER, "a"), turn(TOKENIZER, "b"))
    started = time.perf_counter()
    [sample], _ = play(make("again", timeout_s=0.5), script=script)
    assert 0.4 < time.perf_counter() - started < 5
    assert (sample.finish_reason, sample.measures["over_time"], sample.text) == ("time", 1, "a")
    [sample], _ = play(make("two_voices", timeout_s=0.1), script=Slow(turn(TOKENIZER, "a")))
    assert (sample.finish_reason, sample.text, len(sample.turns)) == ("time", "a", 1)


def test_a_function_that_fails_costs_its_sample_alone(caplog):
    environment = make("moody", reply_timeout_s=0.5)
    wishes = ["raise", "hang", "good", "exit", "number"]

    async def beats():
        """The longest time for which the event loop stood still."""
        longest = 0.0
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - start)
            worst[0] = longest

    async def run():
        heart = asyncio.create_task(beats())
        script = Script(*(turn(TOKENIZER, wish) for wish in [*wishes, "fine"]))
        samples = await environment.run(PROMPT, 5, SamplingParams(max_response_tokens=100), script)
        heart.cancel()
        return samples

    worst = [0.0]
    started = time.perf_counter()
    samples = asyncio.run(run())
    assert time.perf_counter() - started < 5
    assert worst[0] < 0.4
    assert [sample.finish_reason for sample in samples] == ["error", "error", "stop", "error", "error"]
    assert [sample.measures["failed"] for sample in samples] == [1, 1, 0, 1, 1]
    assert [sample.text for sample in samples] == ["raise", "hang", "fine", "exit", "number"]
    assert samples[1].measures["seconds"] >= 0.5
    [warning] = caplog.records
    assert "KeyError: 'mood' at " in warning.getMessage()
    assert "replies.py:" in warning.getMessage()


@pytest.mark.parametrize(
    ("reply", "wish", "expected"),
    [
        ("moody", "raise", "KeyError: 'mood' at .*replies.py:"),
        ("moody", "exit", "SystemExit: 3"),
        ("moody", "number", "replies:moody returned 5; it returns None, a text, a message"),
        ("slow", "any", "no answer within 0.3 s"),
    ],
)
def test_on_error_fail_ends_the_run(reply, wish, expected):
    with pytest.raises(RunError, match=expected) as error:
        play(make(reply, on_error="fail", reply_timeout_s=0.3), wish)
    assert "\n" not in str(error.value)


def test_a_function_that_hangs_does_not_keep_the_process_alive():
    here = Path(__file__).parent
    program = (
        "import asyncio, time\nfrom rl_tpu.environments.calling import TimeLimitError, call\n"
        "try:\n    asyncio.run(call(time.sleep, 60, timeout_s=0.2))\nexcept TimeLimitError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=here.parents[1], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "no answer within 0.2 s\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "reply"),
        ({"reply": "replies:nothing"}, "has no 'nothing'"),
        ({"reply": "replies"}, "package.module:attribute"),
        ({"reply": "replies:no_function"}, "not callable"),
        ({"reply": "replies:guess", "reply_options": {"bonsu": 1}}, "did you mean 'bonus'"),
        ({"reply": "replies:guess", "max_turns": 0}, "max_turns must be greater than 0, it is 0"),
        ({"reply": "replies:guess", "timeout_s": -1}, "timeout_s must be greater than 0"),
        ({"reply": "replies:guess", "max_turn": 2}, "did you mean 'max_turns'"),
        ({"reply": "replies:guess", "on_error": "ignore"}, "'sample' or 'fail'"),
        ({"reply": "replies:guess", "reward_text": "all"}, "'last_turn' or 'whole'"),
    ],
)
def test_bad_options_are_one_line(options, expected):
    with pytest.raises(UserError) as error:
        make_environment(EnvironmentConfig(name="multi_turn", options=options), TOKENIZER)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_the_guide_s_conversation():
    """The class in docs/extending.md, as it stands there."""
    guide = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    [program] = [part for part in guide.split("```python\n")[1:] if "class Echo" in part]
    namespace = {}
    exec(program.partition("```")[0], namespace)
    environment = namespace["Echo"](TOKENIZER, max_turns=2)
    [sample], script = play(environment, "one two", "three")
    assert TOKENIZER.decode(script.calls[1][0]).endswith(f"You said one two. What else?<|im_end|>\n{OPENING}")
    assert (sample.measures["words"], sample.finish_reason) == (3, "turns")
    assert [each.reward for each in sample.turns] == [0.1, 0.1]


def test_the_example_s_function():
    name = "examples.custom_environment.check:check"
    environment = make_environment(EnvironmentConfig(name="multi_turn", options={"reply": name}), TOKENIZER)
    [sample], _ = play(environment, "<answer>4</answer>", "<answer>5</answer>")
    assert [each.reward for each in sample.turns] == [-0.1, 0]
    assert (sample.finish_reason, sample.text) == ("stop", "<answer>5</answer>")
