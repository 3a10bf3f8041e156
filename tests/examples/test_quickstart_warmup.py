"""The quickstart's starting policy: made once, the same every time, and without a look at the held-out problems."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warmup
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.data import load_prompts
from rl_tpu.data.problem import side
from rl_tpu.rewards.reasoning_gym import score
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer

STEPS = 12


def start(out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, warmup.__file__, "--out", str(out), "--steps", str(STEPS), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with the same model made twice: `model` by two processes at a time, `again` by a third one later."""
    folder = tmp_path_factory.mktemp("warmup")
    racing = [start(folder / "model"), start(folder / "model")]
    outputs = [finish(process) for process in racing]
    finish(start(folder / "again"))
    return folder, outputs


@pytest.fixture(scope="module")
def tokenizer(made):
    return AutoTokenizer.from_pretrained(made[0] / "model", local_files_only=True)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return load_prompts(warmup.PROBLEMS, tokenizer, max_prompt_tokens=64, too_long="fail").prompts


def test_one_of_two_processes_makes_it_and_nothing_half_made_stays(made):
    folder, outputs = made
    assert sorted("exists already" in output for output in outputs) == [False, True]
    assert {path.name for path in folder.iterdir() if path.suffix != ".lock"} == {"model", "again"}


def test_two_runs_write_the_same_bytes(made):
    folder, _ = made
    names = {path.name for path in (folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert names == {path.name for path in (folder / "again").iterdir()}
    for name in names:
        assert (folder / "model" / name).read_bytes() == (folder / "again" / name).read_bytes(), name


def test_it_learns(made, tokenizer):
    """Knowing nothing costs log(vocabulary) per token; a few steps in, the answers' shape is cheaper than that."""
    _, outputs = made
    loss = float(re.search(r"loss ([\d.]+)", "".join(outputs))[1])
    assert loss < 0.6 * math.log(len(tokenizer))


def test_transformers_computes_the_same_policy(made, tokenizer, prompts):
    model, loading = AutoModelForCausalLM.from_pretrained(made[0] / "model", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")

    sample = warmup.demonstration(prompts[0], tokenizer, worked_share=1.0, dice=random.Random(0))
    trainer = PolicyTrainer(warmup.TRAINER, AlgorithmConfig(), made[0] / "model")
    try:
        ours = trainer.logprobs(pack([sample], [64]))[0]
    finally:
        trainer.close()
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        theirs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(ours[: len(theirs)], theirs, atol=2e-5, rtol=0)


def test_the_chat_template_renders_all_roles(tokenizer):
    turns = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "1 + 2 ="},
        {"role": "assistant", "content": "<answer>3</answer>"},
        {"role": "user", "content": "Größer als 10 - 12 = -2? 数学 🙂"},
    ]
    rendered = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == rendered + "<|im_start|>assistant\n"
    assert ids.count(tokenizer.eos_token_id) == len(turns)
    assert (
        tokenizer.apply_chat_template(turns, return_dict=False)
        == ids[: -len(tokenizer.encode("<|im_start|>assistant\n"))]
    )


def test_digits_and_signs_are_tokens_of_their_own(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<answer>-13</answer>")) == [
        "<answer>",
        "-",
        "1",
        "3",
        "</answer>",
    ]


def test_answers_worked_out_are_right_and_guesses_seldom(tokenizer, prompts):
    dice = random.Random(0)
    for prompt in prompts[:500]:
        worked = warmup.demonstration(prompt, tokenizer, 1.0, dice)
        assert score(worked.text, prompt.answer, prompt) == 1
        for line in worked.text.splitlines()[:-1]:
            left, right = line.split(" = ")
            assert eval(left) == int(right)
    guesses = [warmup.demonstration(prompt, tokenizer, 0.0, dice) for prompt in prompts]
    right = sum(score(guess.text, prompt.answer, prompt) for guess, prompt in zip(guesses, prompts, strict=True))
    assert right / len(prompts) == pytest.approx(1 / 3, abs=0.04)  # 3 standard deviations are 0.026


def test_demonstrations_end_their_turn_and_fit(tokenizer, prompts):
    longest = load_config(["+experiment=quickstart"]).rollout.max_response_tokens
    for batch in warmup.demonstrations(prompts, tokenizer, steps=8, seed=1):
        for sample in batch:
            assert tokenizer.decode(sample.response_ids) == sample.text + "<|im_end|>"
            assert len(sample.response_ids) <= longest


def test_lessons_first_then_the_mixture(tokenizer, prompts):
    batches = list(warmup.demonstrations(prompts, tokenizer, steps=100, seed=0))
    worked = [sum("=" in sample.text for sample in batch) / len(batch) for batch in batches]
    assert worked[:70] == [1.0] * 70
    assert sum(worked[70:]) / 30 == pytest.approx(warmup.WORKED_SHARE, abs=0.03)


def test_no_held_out_problem_is_demonstrated(tokenizer, prompts):
    config = load_config(["+experiment=quickstart"])
    held_out = {
        prompt.metadata["question"]
        for chosen in config.evaluation.sets.values()
        for prompt in load_prompts(chosen.source, tokenizer, max_prompt_tokens=64, too_long="fail").prompts
    }
    assert len(held_out) >= 256
    asked = set()
    for batch in warmup.demonstrations(prompts, tokenizer, steps=100, seed=0):
        asked |= {re.search(r"user\n(.*)<\|im_end\|>", tokenizer.decode(sample.prompt_ids))[1] for sample in batch}
    assert len(asked) > 2000
    assert not asked & held_out
    assert {side(question, config.data.train.held_out_share) for question in asked} == {"train"}


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--steps", "0"], "--steps must be at least 1"), (["--out", "/proc/nowhere/model"], "cannot be written")],
)
def test_bad_arguments_end_in_one_line(tmp_path, options, message):
    process = start(tmp_path / "model", *options)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in output
    assert "Traceback" not in output
