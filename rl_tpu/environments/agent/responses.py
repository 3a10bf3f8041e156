"""Answers in the form of the OpenAI chat API: one object, or the events of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "policy"
"""What the policy is called; a request may give any name."""


@dataclass(frozen=True)
class Answer:
    """What the policy wrote in answer to one request.

    ``content`` is the text without its tool calls, ``tool_calls`` (name, arguments as JSON) are what was parsed from it.
    ``tokens`` are (text, log-probability) of every sampled token.
    """

    id: str
    created: int
    content: str
    tool_calls: list[tuple[str, str]]
    finish_reason: str
    tokens: list[tuple[str, float]]
    prompt_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, which an agent puts into its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": f"call_{self.id}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(self.tool_calls)
            ]
        return message


def completion(answer: Answer, logprobs: bool) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer) if logprobs else None,
    }
    return _envelope(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, logprobs: bool, include_usage: bool) -> Iterator[str]:
    """The answer as server-sent events: the message, why it ended, its usage if that was asked for, and the end mark."""
    message = answer.message
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    pieces: list[dict[str, Any]] = [
        {"choices": [_delta(message, None, _logprobs(answer) if logprobs else None)]},
        {"choices": [_delta({}, answer.finish_reason, None)]},
    ]
    if include_usage:
        pieces = [{**piece, "usage": None} for piece in pieces] + [{"choices": [], "usage": _usage(answer)}]
    for piece in pieces:
        yield f"data: {json.dumps(_envelope(answer, 'chat.completion.chunk') | piece)}\n\n"
    yield "data: [DONE]\n\n"


def models(context_tokens: int) -> dict[str, Any]:
    """The body of `GET /models`."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl_tpu", "max_model_len": context_tokens}
    return {"object": "list", "data": [model]}


def _delta(delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": MODEL}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.tokens),
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
    }


def _logprobs(answer: Answer) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]
    return {"content": content, "refusal": None}
