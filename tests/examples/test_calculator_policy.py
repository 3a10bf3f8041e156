"""The calculator example: what its policy is shown, and what reinforcement learning makes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import make_policy
import pytest
from tiny_model import make_tokenizer

from rl_tpu.config.compose import load_config
from rl_tpu.data import load_prompts
from rl_tpu.data.problem import side
from rl_tpu.environments import make_environment
from rl_tpu.environments.hermes import parse_calls
from rl_tpu.rewards.reasoning_gym import score
from rl_tpu.types import Completion, SamplingParams, VersionSpan


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(make_policy.PIECES, make_policy.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def shown(tokenizer):
    """A thousand demonstrations, after the lessons."""
    batches = list(make_policy.demonstrations(tokenizer, steps=50, seed=0))
    assert all(len(sample.turns) == 2 for batch in batches[:35] for sample in batch)
    return [sample for batch in batches[35:] for sample in batch]


@pytest.fixture(scope="module")
def environment(tokenizer):
    return make_environment(load_config(["+experiment=calculator"]).environment, tokenizer)


def test_every_demonstration_is_right_and_half_of_those_that_can_call_do(tokenizer, shown):
    counts = {"no tool": 0, "at once": 0, "calls": 0}
    for sample in shown:
        text = tokenizer.decode(sample.prompt_ids)
        question = text.partition("problem: ")[2].partition(" =")[0]
        answer = tokenizer.decode(sample.response_ids).rpartition("<answer>")[2].partition("</answer>")[0]
        assert int(answer) == eval(question)
        has_tool = text.startswith("<|im_start|>system\nTools: calculator<|im_end|>\n")
        calls = len(sample.turns) == 2
        assert has_tool or not calls
        counts["calls" if calls else "at once" if has_tool else "no tool"] += 1
    assert counts["no tool"] / len(shown) == pytest.approx(make_policy.NO_TOOL_SHARE, abs=0.04)
    with_tool = counts["calls"] + counts["at once"]
    assert counts["calls"] / with_tool == pytest.approx(make_policy.CALL_SHARE, abs=0.06)


def test_what_the_tool_says_is_not_learned(tokenizer, shown):
    sample = next(sample for sample in shown if len(sample.turns) == 2)
    not_learned = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if not mask]
    answer = sample.text.rpartition("<answer>")[2].partition("</answer>")[0]
    assert tokenizer.decode(not_learned) == f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n"


def test_the_run_meets_what_was_demonstrated_token_by_token(tokenizer, environment, shown):
    """The environment of the experiment, with a policy that writes the demonstrated turns."""
    config = load_config(["+experiment=calculator"])
    prompts = load_prompts(
        make_policy.PROBLEMS,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        too_long="fail",
        template_options=environment.template_options,
    ).prompts
    by_ids = {prompt.ids: prompt for prompt in prompts}
    params = SamplingParams(config.rollout.max_response_tokens)
    compared = 0
    for sample in shown:
        if len(sample.turns) == 2:
            turns = iter(sample.turns)

            async def write(ids, params, n, sample=sample, turns=turns):
                turn = next(turns)
                written = sample.response_ids[turn.start : turn.end]
                assert len(written) <= params.max_response_tokens
                return [Completion(written, [0.0] * len(written), "stop", [VersionSpan(0, 0, len(written))])]

            [got] = asyncio.run(environment.run(by_ids[tuple(sample.prompt_ids)], 1, params, write))
            assert (got.response_ids, got.loss_mask) == (sample.response_ids, sample.loss_mask)
            assert (got.measures["tool_calls"], got.measures["tool_errors"]) == (1, 0)
            assert got.measures["template_mismatch"] == 0
            assert score(got.text, by_ids[tuple(sample.prompt_ids)].answer, by_ids[tuple(sample.prompt_ids)]) == 1
            compared += 1
    assert compared > 300


def test_the_longest_conversation_fits():
    """Three terms of four digits."""
    config = load_config(["+experiment=calculator"])
    tokenizer = make_tokenizer(make_policy.PIECES, make_policy.CHAT_TEMPLATE)
    call = f"{make_policy.CALL_START}9999 + 9999 + 9999{make_policy.CALL_END}<|im_end|>"
    assert parse_calls(call)[1][0].arguments == {"expression": "9999 + 9999 + 9999"}
    assert len(tokenizer.encode(call)) <= config.environment.options["max_turn_tokens"]
    rest = "\n<|im_start|>tool\n-19997<|im_end|>\n<|im_start|>assistant\n<answer>-19997</answer><|im_end|>"
    assert len(tokenizer.encode(call + rest)) <= config.rollout.max_response_tokens


def test_no_held_out_problem_is_shown(tokenizer, shown):
    config = load_config(["+experiment=calculator"])
    asked = {tokenizer.decode(sample.prompt_ids).partition("user\n")[2].partition("<|im_end|>")[0] for sample in shown}
    held_out = {
        prompt.metadata["question"]
        for chosen in config.evaluation.sets.values()
        for prompt in load_prompts(chosen.source, tokenizer, max_prompt_tokens=64, too_long="fail").prompts
    }
    assert len(held_out) >= 128
    assert not asked & held_out
    assert {side(question, config.data.train.held_out_share) for question in asked} == {"train"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_policy_learns_to_call_and_without_the_tool_it_does_not_get_better(tmp_path):
    """The whole experiment, once as it is and once without the tool."""

    def accuracy(name: str, *overrides: str) -> tuple[float, float]:
        run_dir = tmp_path / name
        command = [sys.executable, "-m", "rl_tpu.train", "+experiment=calculator", f"run_dir={run_dir}", *overrides]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1400)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
        values = [row["eval/held_out/reward_mean"] for row in rows]
        return values[0], values[-1]

    before, after = accuracy("with")
    assert 0.3 < before < 0.6
    assert after > 0.85
    _, without = accuracy("without", "environment=single_turn")
    assert without < 0.1
