"""Tiny Qwen3 models, their transformers twins, and samples to train on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

# The registry's torchvision is built for CUDA: beside a CPU torch its operators are missing, and transformers imports it.
_torchvision = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for _operator in ("nms", "qnms"):
        _torchvision.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from rl_tpu.types import Sample, VersionSpan

VOCABULARY = 256


def tiny_qwen3(tied: bool) -> Qwen3ForCausalLM:
    """Two layers, with weights and norms far enough from their initial values that a mistake shows."""
    torch.manual_seed(int(tied))
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0, 0.08)
    return model


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> dict[bool, Path]:
    """Hugging Face directories of the tied and the untied model, by `tied`."""
    root = tmp_path_factory.mktemp("models")
    directories = {tied: root / ("tied" if tied else "untied") for tied in (True, False)}
    for tied, directory in directories.items():
        tiny_qwen3(tied).save_pretrained(directory)
    return directories


@pytest.fixture(scope="session")
def model_dir(model_dirs) -> Path:
    return model_dirs[True]


def make_samples(count: int, seed: int = 0, longest: int = 60) -> list[Sample]:
    """Random samples of unequal length; some response tokens belong to the environment."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt, response = draw.randint(1, longest // 3), draw.randint(1, 2 * longest // 3)
        mask = [int(draw.random() < 0.8) for _ in range(response)]
        samples.append(
            Sample(
                prompt_ids=[draw.randrange(VOCABULARY) for _ in range(prompt)],
                response_ids=[draw.randrange(VOCABULARY) for _ in range(response)],
                loss_mask=mask,
                logprobs=[draw.uniform(-7, -3) for _ in range(response)],
                spans=[VersionSpan(0, 0, response)],
                finish_reason="stop",
                advantage=draw.gauss(0, 1),
            )
        )
    return samples


@torch.no_grad()
def transformers_logprobs(model: Qwen3ForCausalLM, sample: Sample, temperature: float = 1.0) -> list[float]:
    """Log-probability of every response token, one sample at a time, without packing."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    table = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    first = len(sample.prompt_ids)
    return [float(table[t - 1, ids[0, t]]) for t in range(first, ids.shape[1])]
