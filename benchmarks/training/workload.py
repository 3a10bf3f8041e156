"""What every measured process trains on, and how it counts. Needs torch and transformers only, in any environment.

The model is a small Qwen3 in float32 with random weights; a batch is prompts with 8 answers each, drawn from a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ANSWERS = 8
LEARNING_RATE, BETAS, MAX_GRAD_NORM = 1e-6, (0.9, 0.95), 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Answer:
    """One sample of the batch: ids of prompt and response, and its reward. Neither id 0 nor 1 occurs."""

    prompt: list[int]
    response: list[int]
    reward: float
    advantage: float


@dataclass(frozen=True)
class Workload:
    """So many prompts of so many tokens; answers of `shortest` to `longest` tokens, the length log-uniform."""

    prompts: int
    prompt_tokens: int
    shortest: int
    longest: int


WORKLOADS = {
    "w1": Workload(prompts=16, prompt_tokens=32, shortest=128, longest=128),
    "w2": Workload(prompts=16, prompt_tokens=32, shortest=8, longest=256),
    "long_prompts": Workload(prompts=4, prompt_tokens=512, shortest=64, longest=128),
}


def batch(name: str) -> list[Answer]:
    """The samples of a workload, group after group."""
    workload = WORKLOADS[name]
    lengths = math.log(workload.shortest), math.log(workload.longest + 1)
    random = np.random.default_rng(0)
    answers = []
    for _ in range(workload.prompts):
        prompt = random.integers(2, MODEL["vocab_size"], workload.prompt_tokens).tolist()
        rewards = random.normal(size=ANSWERS)
        for reward in rewards:
            length = int(math.exp(random.uniform(*lengths)))
            response = random.integers(2, MODEL["vocab_size"], length).tolist()
            advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            answers.append(Answer(prompt, response, float(reward), float(advantage)))
    return answers


def write_model(directory: Path) -> None:
    """A Hugging Face directory of the model, float32, from seed 0."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(directory)


def tokens(answers: list[Answer]) -> int:
    """Tokens of prompts and responses."""
    return sum(len(answer.prompt) + len(answer.response) for answer in answers)


def arguments() -> argparse.ArgumentParser:
    """What every measured process is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--model", type=Path, help="directory that write_model made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    return parser


def reset_peak_memory() -> float:
    """Forget the process's peak of resident memory; GB resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_gb("VmRSS")


def peak_memory() -> float:
    """GB resident at most since `reset_peak_memory`."""
    return _status_gb("VmHWM")


def measure(step: Callable[[], float], options: argparse.Namespace, **facts: Any) -> None:
    """Run `step`, which returns the norm of its gradient, so many times and print one line of JSON about it."""
    before = reset_peak_memory()
    seconds, norms = [], []
    for _ in range(options.warmup + options.steps):
        started = time.perf_counter()
        norms.append(step())
        seconds.append(time.perf_counter() - started)
    report(seconds[options.warmup :], before, options, gradient_norm=norms[0], **facts)


def report(seconds: list[float], memory_before: float, options: argparse.Namespace, **facts: Any) -> None:
    """Print what a process measured, as its last line."""
    line = {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "peak_memory_gb": peak_memory(),
        "memory_before_gb": memory_before,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(line | facts), flush=True)


def _status_gb(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024 / 1e9
