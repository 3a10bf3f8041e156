r"""Mathematical answers: found where the prompt asked for them, compared as expressions."""

from __future__ import annotations

import re
from typing import Any, Literal

from rl_tpu.boxed import last_boxed
from rl_tpu.rewards.equivalence import equivalent, read, same_reading, search
from rl_tpu.rewards.extract import (
    after_thinking,
    find_answer,
    last_answer_line,
    last_tagged,
    strip_marks,
)
from rl_tpu.rewards.units import split_unit
from rl_tpu.types import Prompt


def score(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    answer_format: Literal["any", "boxed", "answer_line", "last_line", "tag", "free"] = "any",
    needs_think_end: bool = False,
    correct: float = 1.0,
    incorrect: float = 0.0,
) -> float:
    r"""``correct`` if the response's last answer equals ``answer`` as a mathematical expression, else ``incorrect``.

    ``answer_format`` says where an answer counts, and must fit what the prompt asks for: ``boxed`` (``\boxed{...}``),
    ``answer_line`` (a line ``Answer: ...``), ``last_line`` (the same, and it must be the last: what the prompts of
    DAPO-Math-17k ask for), ``tag`` (``<answer>...</answer>``), ``any`` of these, whichever comes last, or ``free`` (as
    ``any``, but an answer line may be a sentence, and without any of these Math-Verify searches the last 4000
    characters).

    What stands inside ``<think>`` does not count, also if it never closes. ``needs_think_end``: nor does a response
    without ``</think>``; for chat templates that open the thinking in the prompt.

    A percent sign is a unit; an answer may leave its unit out but not have another one.
    """
    if not isinstance(answer, (str, int, float)):
        raise TypeError(f"the expected answer must be text or a number, it is {answer!r}")
    if needs_think_end and "</think>" not in text:
        return incorrect
    return correct if _is_right(after_thinking(text), str(answer), answer_format) else incorrect


def _is_right(response: str, answer: str, answer_format: str) -> bool:
    if answer_format == "free" and (text := _searched(response)) is not None:
        return same_reading(_expected(answer), search(text))
    given = find_answer(response, "any" if answer_format == "free" else answer_format)
    return given is not None and equivalent(strip_marks(answer), given)


def _searched(response: str) -> str | None:
    """What `free` gives to Math-Verify: the last answer line, which may be a sentence, or everything; None after a box."""
    line, marked = (
        last_answer_line(response),
        max(filter(None, (last_boxed(response), last_tagged(response))), default=None),
    )
    if marked and (not line or marked > line or last_boxed(line[1])):
        return None
    return line[1] if line else response


def _expected(answer: str) -> tuple:
    """The expected answer, searched if it is text with marked mathematics in it, else read whole."""
    if any(mark in answer for mark in ("$", r"\boxed", r"\(", r"\[")) or re.fullmatch(r"[-+\d.,\s]+", answer):
        return search(answer)
    return read(split_unit(answer.strip())[0])
