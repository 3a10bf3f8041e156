"""The task that both sides of `benchmarks/step.py` take whole steps on. Needs transformers and tokenizers only.

A directory of a small Qwen3 with random weights and a tokenizer of one word per token, `t2` to `t2047`; prompts of 32 words.
An answer ends when it has the length that was drawn for it, so that both write exactly the same numbers of tokens.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from workload import ANSWERS, MODEL, WORKLOADS, write_model

PROMPTS = 256
TEMPLATE = "{{ messages[-1]['content'] }}"
LONGEST = max(workload.longest for workload in WORKLOADS.values())


def digits(text: str) -> float:
    """The reward: the share of digits in a text."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def lengths(workload: str, seed: int = 0) -> Iterator[int]:
    """Tokens of one answer after the other, log-uniform within the workload's bounds."""
    dice, chosen = random.Random(seed), WORKLOADS[workload]
    low, high = math.log(chosen.shortest), math.log(chosen.longest + 1)
    while True:
        yield int(math.exp(dice.uniform(low, high)))


def prompts() -> list[str]:
    dice, tokens = random.Random(0), WORKLOADS["w1"].prompt_tokens
    return [" ".join(f"t{dice.randrange(2, MODEL['vocab_size'])}" for _ in range(tokens)) for _ in range(PROMPTS)]


def write(directory: Path) -> None:
    """``model/`` and ``prompts.jsonl``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = directory / "model"
    write_model(model)
    words = ["<pad>", "<end>", *(f"t{index}" for index in range(2, MODEL["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(model)
    # No token of its own ends an answer.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (model / "generation_config.json").unlink(missing_ok=True)
    rows = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts()]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")


__all__ = ["ANSWERS", "LONGEST", "MODEL", "WORKLOADS", "digits", "lengths", "prompts", "write"]
