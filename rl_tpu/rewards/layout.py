"""Rewards for how an answer is written, whatever it says: its tags, its length, its repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_tpu.rewards.registry import Response, takes_response
from rl_tpu.types import Prompt

Positive = Annotated[int, Field(ge=1)]


def tags(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    names: Sequence[str] = ("think", "answer"),
    opened: bool = False,
    match: float = 1.0,
    no_match: float = 0.0,
) -> float:
    """``match`` if the response is ``<think>...</think><answer>...</answer>``: every tag once, in order, nothing outside.

    Blank space may stand between the tags; what they hold must not be blank. ``opened``: the prompt ends with the first
    opening tag already, so the response starts inside it.
    """
    text = f"<{names[0]}>{text}" if opened else text
    position = 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return no_match
        start, end = text.index(opening), text.index(closing)
        if text[position:start].strip() or not text[start + len(opening) : end].strip():
            return no_match
        position = end + len(closing)
    return no_match if text[position:].strip() else match


@takes_response
def length(
    response: Response,
    answer: Any,
    prompt: Prompt,
    *,
    free: Annotated[int, Field(ge=0)],
    limit: Positive,
    shape: Literal["linear", "cosine"] = "linear",
    unit: Literal["tokens", "characters"] = "tokens",
    penalty: float = 1.0,
) -> float:
    """0 up to the length ``free``, falling to -``penalty`` at ``limit`` and staying there.

    ``linear`` is the soft punishment of DAPO (arXiv 2503.14476, equation 13); ``cosine`` falls along half a cosine
    (arXiv 2502.03373), gently at both ends.
    """
    if limit <= free:
        raise ValueError(f"limit {limit} must be more than free {free}")
    long = response.tokens if unit == "tokens" else len(response.text)
    share = min(1.0, max(0.0, (long - free) / (limit - free)))
    return -penalty * (share if shape == "linear" else (1.0 - math.cos(math.pi * share)) / 2.0)


def repetition(text: str, answer: Any, prompt: Prompt, *, words: Positive = 4, penalty: float = 1.0) -> float:
    """-``penalty`` times the share of the response's runs of so many ``words`` that occurred before (arXiv 2502.03373).

    0 for a text without repetition, near -``penalty`` for one that goes round in circles.
    """
    split = text.split()
    runs = [tuple(split[start : start + words]) for start in range(len(split) - words + 1)]
    return -penalty * (1.0 - len(set(runs)) / len(runs)) if runs else 0.0
