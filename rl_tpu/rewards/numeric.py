"""Plain numbers: how models write them, when two are equal, and the GSM8K grader."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Literal

from rl_tpu.rewards.extract import after_thinking, find_answer, strip_marks
from rl_tpu.types import Prompt

DECIMALS = 1e-6
"""A decimal may be cut or rounded at the sixth place (0.333333 for 1/3), as Math-Verify has it ..."""
RELATIVE = 2e-6
"""... but no number is so small that this makes it zero."""
NUMBER_CHARACTERS = 60

_DIGITS = r"(?:\d{1,3}(?:(?:,(?:\\!\s?)?|\{,\}|\\,|\\!,|[ \u00a0\u202f])\d{3})+|\d+)"
_NUMBER = re.compile(rf"([+\-−]?)\s*({_DIGITS}?)(\.\d+)?\.?")
_FRACTION = re.compile(
    r"([+\-−]?)\s*(?:\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\\[dt]?frac\s*(\d)\s*(\d)|(\d+)\s*/\s*(\d+))"
)
_IN_TEXT = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?!\w)")


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    r"""An integer, decimal or simple fraction, and whether it has decimals; None for anything else.

    Understands thousands separators (``1,000``, ``1{,}000``), the sign ``−``, ``\frac{1}{2}``, ``\frac12`` and ``1/2``.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    text = text.strip()
    if match := _NUMBER.fullmatch(text):
        sign, whole, decimals = match.groups()
        if whole or decimals:
            number = Fraction(re.sub(r"\D", "", whole or "0") + (decimals or ""))
            return (-number if sign in ("-", "−") else number), decimals is not None
    elif match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        if below:
            return Fraction(-above if sign in ("-", "−") else above, below), False
    return None


def same_number(expected: tuple[Fraction, bool], given: tuple[Fraction, bool]) -> bool:
    """Equal, or equal up to where a decimal was cut; see `DECIMALS` and `RELATIVE`."""
    difference = abs(expected[0] - given[0])
    if not difference:
        return True
    cut = expected[1] or given[1]
    return cut and difference < DECIMALS and difference <= RELATIVE * abs(expected[0])


def gsm8k(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    answer_format: Literal["hashes", "boxed", "answer_line", "any", "last_number"] = "hashes",
    correct: float = 1.0,
    incorrect: float = 0.0,
) -> float:
    r"""``correct`` if the response's last answer is the number that stands behind ``####`` in ``answer``.

    ``answer`` may also be the bare number. ``answer_format`` says where an answer counts: ``hashes`` (``#### 42``),
    ``boxed``, ``answer_line``, ``any`` of these (the last), or ``last_number`` of the whole response. Dollar and percent
    signs and thousands separators are left out of the comparison.
    """
    expected = _number(str(answer).rpartition("####")[2])
    if expected is None:
        raise ValueError(f"the expected answer {answer!r} is no number, nor ends in one behind ####")
    given = _given(after_thinking(text), answer_format)
    return correct if given is not None and same_number(expected, given) else incorrect


def _given(response: str, answer_format: str) -> tuple[Fraction, bool] | None:
    if answer_format == "last_number":
        found = _IN_TEXT.findall(response)
        return _number(found[-1]) if found else None
    if answer_format in ("hashes", "any"):
        _, hashes, rest = response.rpartition("####")
        if hashes and (answer_format == "hashes" or find_answer(rest) is None):
            return _number(rest.strip().partition("\n")[0])
        if answer_format == "hashes":
            return None
    found = find_answer(response, answer_format)
    return _number(found) if found is not None else None


def _number(text: str) -> tuple[Fraction, bool] | None:
    return plain_number(re.sub(r"\\?[$%]", "", strip_marks(text)))
