r"""Mathematical answers: `\boxed{}` or an ``Answer:`` line, compared as expressions by Math-Verify."""

from __future__ import annotations

import logging
from typing import Any, Literal

from math_verify import LatexExtractionConfig, parse, verify

from rl_tpu.rewards.extract import after_thinking, last_answer_line, last_boxed, strip_marks
from rl_tpu.types import Prompt

AnswerFormat = Literal["any", "boxed", "answer_line", "free"]

MAX_ANSWER_CHARACTERS = 1000
"""A policy that repeats itself writes endless answers. Longer ones are wrong at once, instead of at the deadline."""
FREE_CHARACTERS = 4000
"""How much of a response's end `free` searches."""

# Its own time-outs need SIGALRM and with it the main thread. They stay off: a reward worker has a deadline.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    answer_format: AnswerFormat = "any",
    correct: float = 1.0,
    incorrect: float = 0.0,
) -> float:
    r"""``correct`` if the response's last answer equals ``answer`` as a mathematical expression, else ``incorrect``.

    ``answer_format`` says where an answer counts, and must fit what the prompt asks for: ``boxed`` (``\boxed{...}``),
    ``answer_line`` (``Answer: ...``, the format of DAPO-Math-17k), ``any`` of both, whichever comes last, or ``free``
    (Math-Verify's search of the last 4000 characters). After a ``</think>`` only what follows the last one is read.
    A percent sign is a unit and, like other units, left out of the comparison.
    """
    if not isinstance(answer, (str, int, float)):
        raise TypeError(f"the expected answer must be text or a number, it is {answer!r}")
    response = after_thinking(text)
    expected = strip_marks(str(answer))
    if answer_format == "free":
        found = parse(response[-FREE_CHARACTERS:], parsing_timeout=None)
        return correct if _equal(expected, found) else incorrect
    given = extract_answer(response, answer_format)
    if given is None or len(given) > MAX_ANSWER_CHARACTERS:
        return incorrect
    return correct if given == expected or _equal(expected, _reading(given)) else incorrect


def extract_answer(response: str, answer_format: AnswerFormat) -> str | None:
    """The last answer in the given format, without its wrapping; None if there is none."""
    boxed = last_boxed(response) if answer_format != "answer_line" else None
    line = last_answer_line(response) if answer_format != "boxed" else None
    if line:
        inside = last_boxed(line[1])
        line = (line[0], inside[1] if inside else line[1])
    last = max((found for found in (boxed, line) if found), default=None)
    return strip_marks(last[1]) if last else None


def _equal(expected: str, given: list) -> bool:
    return verify(_reading(expected), given, timeout_seconds=None)


def _reading(answer: str) -> list:
    r"""An answer read whole, as LaTeX. Without the box, Math-Verify would look for an answer inside it: 4 in 4\sqrt{2}."""
    for plain, latex in ((">=", r"\geq "), ("<=", r"\leq "), ("!=", r"\neq "), (r"\%", ""), ("%", "")):
        answer = answer.replace(plain, latex)
    return parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
