"""SmolLM2-135M, a real model: its log-probabilities against transformers, and a step of GRPO on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_families import differences
from tiny_policy import one_rank, transformers_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_tpu.config.compose import cache_directory
from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.types import Sample, VersionSpan

pytestmark = pytest.mark.slow

CONVERSATIONS = [
    ("What is 3 + 4?", "3 + 4 = 7.", 1.0),
    ("What is 3 + 4?", "The sum of three and four is eight.", -1.0),
    ("Name a city in France.", "Paris is the capital of France, on the river Seine.", 0.5),
    ("Write a line of Python that prints hello.", 'print("hello")', -0.5),
    ("Translate 'good morning' to German.", "Guten Morgen!", 0.25),
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    directory = Path(cache_directory()) / "smollm2-135m"
    if not directory.exists():
        pytest.fail(f"{directory} is missing: run `make real-model`")
    return directory


@pytest.fixture(scope="module")
def samples(model_dir) -> list[Sample]:
    """Conversations in the model's own template; advantages, and the log-probabilities that transformers gives."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = transformers_model(model_dir, torch.float32)
    samples = []
    for question, answer, advantage in CONVERSATIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        response = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        sample = Sample(
            prompt_ids=tokenizer(prompt, add_special_tokens=False)["input_ids"],
            response_ids=response,
            loss_mask=[1] * len(response),
            logprobs=[0.0] * len(response),
            spans=[VersionSpan(0, 0, len(response))],
            finish_reason="stop",
            advantage=advantage,
        )
        sample.logprobs = transformers_logprobs(model, sample)
        samples.append(sample)
    return samples


def transformers_model(model_dir: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def test_logprobs_are_those_of_transformers(model_dir, samples):
    exact = transformers_model(model_dir, torch.float32)
    batch = pack(samples, [128])
    with one_rank(model_dir) as trainer:
        ours = differences(exact, samples, batch, trainer.logprobs(batch))
    assert ours.max() < 1e-4
    with one_rank(model_dir, param_dtype="bfloat16") as trainer:
        rounded = differences(exact, samples, batch, trainer.logprobs(batch))
    theirs = transformers_model(model_dir, torch.bfloat16)
    gap = torch.cat(
        [(torch.tensor(transformers_logprobs(theirs, s)) - torch.tensor(s.logprobs)).abs() for s in samples]
    )
    print(
        f"float32 {ours.max():.2e}; bfloat16 mean {rounded.mean():.4f} max {rounded.max():.4f}, "
        f"transformers mean {gap.mean():.4f} max {gap.max():.4f}"
    )
    assert rounded.mean() <= gap.mean()


def test_a_step_of_grpo_makes_good_answers_likelier(model_dir, samples):
    batch = pack(samples, [128])
    with one_rank(model_dir, optimizer=OptimizerConfig(learning_rate=1e-5)) as trainer:
        before = trainer.logprobs(batch)
        metrics = trainer.update(batch)
        after = trainer.logprobs(batch)
    print({name: round(value, 6) for name, value in metrics.items()})
    assert metrics["train/logprob_diff_max"] < 1e-4
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-4)
    gain = ((after - before) * batch.advantages * batch.loss_mask).sum()
    assert gain > 0
