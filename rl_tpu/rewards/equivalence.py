"""When two written answers are the same: plain numbers by their value, all else as Math-Verify reads it.

Math-Verify forgives more than a reward should: centimetres are metres to it, and a pair is a set. That is ruled out here.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify

from rl_tpu.rewards.extract import strip_marks
from rl_tpu.rewards.numeric import plain_number, same_number
from rl_tpu.rewards.units import split_unit

# Its own time-outs need SIGALRM and with it the main thread. They stay off: a reward worker has a deadline.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARACTERS = 1000
"""A policy that repeats itself writes endless answers. Longer ones are wrong at once, instead of at the deadline."""
FREE_CHARACTERS = 4000
"""How much of a response's end Math-Verify searches."""

_CONFIG = LatexExtractionConfig()
# Its list of units has single letters: it reads 5t as 5.
_READING = [replace(_CONFIG, normalization_config=replace(_CONFIG.normalization_config, units=False))]
_BRACKETS = re.compile(r"\\\{|\\\}|[()\[\]]|\\.", re.DOTALL)
_SUBJECT = re.compile(r"^\s*[A-Za-z](?:_\w|_\{\w+\})?\s*(?:\\in\b|=)\s*")


@lru_cache(maxsize=4096)
def equivalent(expected: str, given: str) -> bool:
    """Whether ``given`` is the answer ``expected``. Both are bare answers: no box, no dollars. May take forever."""
    if given == expected:
        return True
    if max(len(given), len(expected)) > MAX_ANSWER_CHARACTERS:
        return False
    given, given_unit = split_unit(given)
    expected, expected_unit = split_unit(expected, letters=given_unit is not None)
    if expected_unit and given_unit and expected_unit != given_unit:
        return False
    expected, given = strip_marks(expected), strip_marks(given)
    if _brackets(expected) and _brackets(given) and _brackets(expected) != _brackets(given):
        return False
    told = _by_value(expected, given)
    return same_reading(read(expected), read(given)) if told is None else told


def _by_value(expected: str, given: str) -> bool | None:
    """Whether two numbers, or tuples or intervals of them, are the same; None where that needs an algebra system."""
    subject = _SUBJECT.match(given)
    if subject and ("=" not in expected or re.sub(r"\s", "", expected).startswith(re.sub(r"\s", "", subject[0]))):
        expected, given = _SUBJECT.sub("", expected), given[subject.end() :]
    numbers = plain_number(expected), plain_number(given)
    if all(numbers):
        return same_number(*numbers)
    if (_brackets(expected) or "{")[0] in "([" and _brackets(expected) == _brackets(given):
        pairs = _elements(expected), _elements(given)
        if len(pairs[0]) != len(pairs[1]):
            return False
        told = [_by_value(*pair) for pair in zip(*pairs, strict=True)]
        return False if False in told else None if None in told else True
    return None


def same_reading(expected: tuple, given: tuple) -> bool:
    """Whether two readings of Math-Verify are one answer."""
    return verify(list(expected), list(given), timeout_seconds=None)


@lru_cache(maxsize=512)
def read(answer: str) -> tuple:
    r"""An answer read whole, as LaTeX. Without the box, Math-Verify would look for an answer inside it: 4 in 4\sqrt{2}."""
    for plain, latex in ((">=", r"\geq "), ("<=", r"\leq "), ("!=", r"\neq ")):
        answer = answer.replace(plain, latex)
    return tuple(parse(rf"\boxed{{{answer}}}", _READING, parsing_timeout=None))


def search(text: str) -> tuple:
    """What Math-Verify finds when it searches the end of a text for an answer."""
    return tuple(parse(text[-FREE_CHARACTERS:], parsing_timeout=None))


def _brackets(answer: str) -> str | None:
    """The kind of the brackets around a whole list, set or interval, such as ``(]``; None if there are none."""
    answer = _bare(answer)
    if "," not in answer:
        return None
    kind, depth = "", 0
    for bracket in _BRACKETS.finditer(answer):
        if bracket[0] in ("(", "[", r"\{"):
            depth += 1
            if bracket.start() == 0:
                kind = bracket[0]
        elif bracket[0] in (")", "]", r"\}"):
            depth -= 1
            if depth == 0:
                return kind + bracket[0] if kind and bracket.end() == len(answer) else None
    return None


def _elements(answer: str) -> list[str]:
    """What stands between the commas of a list in brackets, outside of further brackets."""
    elements, depth = [""], 0
    for character in _bare(answer)[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bare(answer: str) -> str:
    """Without ``x =``, ``\\left`` and ``\\right``."""
    return re.sub(r"\\(?:left|right|[bB]igg?[lr]?)\s*(?![A-Za-z])", "", _SUBJECT.sub("", answer)).strip()
