"""`generate` from a script, and completions for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_tpu.types import Completion, Prompt, VersionSpan


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turn(tokenizer: Any, text: str, end: bool = True, version: int = 0) -> Completion:
    """The policy writes a text, and its end token or not."""
    ids = encode(tokenizer, text) + ([tokenizer.eos_token_id] if end else [])
    return Completion(ids, [-0.5] * len(ids), "stop" if end else "length", [VersionSpan(version, 0, len(ids))])


def prompt(tokenizer: Any, *contents: str, options: dict[str, Any] | None = None) -> Prompt:
    """A question of the user, or a system message and one."""
    roles = ("system", "user")[-len(contents) :]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(options or {}))
    return Prompt("p", tuple(encode(tokenizer, text)), "5", tuple(messages))


class Script:
    """Answers from a list, cut to the number of tokens that is asked for, and remembers what it was asked."""

    def __init__(self, *answers: Completion) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[list[int], Any, int]] = []

    async def __call__(self, ids: Sequence[int], params: Any, n: int) -> list[Completion]:
        self.calls.append((list(ids), params, n))
        taken, self.answers = self.answers[:n], self.answers[n:]
        return [_cut(completion, params.max_response_tokens) for completion in taken]


def _cut(completion: Completion, tokens: int) -> Completion:
    if len(completion.response_ids) <= tokens:
        return completion
    spans = [VersionSpan(span.version, span.start, min(span.end, tokens)) for span in completion.spans]
    return Completion(completion.response_ids[:tokens], completion.logprobs[:tokens], "length", spans)
