"""A tiny policy that was taught one conversation of four turns, two of them calls of a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_qwen3 import tiny_config
from transformers import Qwen3ForCausalLM

QUESTION, FOLLOW_UP = "4 + 8?", "And 1?"
TURNS = (
    '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 8}}</tool_call>',
    "It is 12.",
    '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 1}}</tool_call>',
    "It is 13.",
)
HEARD = (("tool", "12"), ("user", FOLLOW_UP), ("tool", "13"))
STEPS = 200


def conversation() -> list[dict[str, str]]:
    messages = [{"role": "user", "content": QUESTION}]
    for said, heard in zip(TURNS, (*HEARD, None), strict=True):
        messages.append({"role": "assistant", "content": said})
        if heard is not None:
            messages.append({"role": heard[0], "content": heard[1]})
    return messages


def teach(path: Path, tokenizer: Any) -> None:
    """Cross-entropy on that one text for some seconds; the policy then mostly says it, and now and then something else."""
    text = tokenizer.apply_chat_template(conversation(), tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two of them wait for each other most of the time
    torch.manual_seed(0)
    more = {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 1024, "initializer_range": 0.1}
    model = Qwen3ForCausalLM(tiny_config(len(tokenizer), False, **more)).to(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 10) * (1 - step / STEPS)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
