r"""Answers compared as text: exactly, by a pattern, or as the letter of a choice."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator

from rl_tpu.rewards.extract import AnswerFormat, after_thinking, find_answer
from rl_tpu.types import Prompt


def exact(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    answer_format: AnswerFormat = "any",
    case_sensitive: bool = False,
    punctuation: bool = False,
    correct: float = 1.0,
    incorrect: float = 0.0,
) -> float:
    """``correct`` if the response's answer is ``answer``, or one of them if it is a list.

    Where ``answer_format`` is `any` and finds no answer, the whole response (after the thinking) is the answer. White
    space, case and the punctuation around an answer do not matter unless the options say so.
    """
    response = after_thinking(text)
    given = find_answer(response, answer_format)
    if given is None:
        if answer_format != "any" or not response.strip():
            return incorrect
        given = response
    expected = answer if isinstance(answer, (list, tuple)) else [answer]
    plain = _normalise(given, case_sensitive, punctuation)
    return correct if any(plain == _normalise(str(one), case_sensitive, punctuation) for one in expected) else incorrect


def _normalise(text: str, case_sensitive: bool, punctuation: bool) -> str:
    text = re.sub(r"[^\x00-\x7f]", _compatible, text)
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if not punctuation:
        text = text.strip(" .,;:!?\"'`*")
    return text if case_sensitive else text.casefold()


def _compatible(character: re.Match[str]) -> str:
    """NFKC of a character, unless that takes away its meaning: 10² is not 102, nor 1½ 11/2."""
    kind = unicodedata.decomposition(character[0])
    keeps = kind.startswith(("<super>", "<sub>", "<fraction>"))
    return character[0] if keeps else unicodedata.normalize("NFKC", character[0])


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern.replace("{answer}", "x"))
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return pattern


def regex(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    pattern: Annotated[str, AfterValidator(_pattern)],
    whole: bool = False,
    match: float = 1.0,
    no_match: float = 0.0,
) -> float:
    """``match`` if the regular expression is found in what follows the thinking (``whole``: in the response as it is).

    ``{answer}`` in the pattern stands for the expected answer, taken literally. ``^`` and ``$`` are the ends of lines and
    the dot takes line breaks too.
    """
    expression = pattern.replace("{answer}", re.escape(str(answer)))
    searched = text if whole else after_thinking(text)
    return match if re.search(expression, searched, re.MULTILINE | re.DOTALL) else no_match


def multiple_choice(
    text: str,
    answer: Any,
    prompt: Prompt,
    *,
    choices: str = "ABCDEFGHIJ",
    answer_format: AnswerFormat = "any",
    correct: float = 1.0,
    incorrect: float = 0.0,
) -> float:
    r"""``correct`` if the response's last answer is the letter ``answer``.

    ``answer`` is a letter of ``choices`` (``B``, ``(b)``) or a position from 0. A response may write ``\boxed{B}``,
    ``Answer: (B)``, ``B. 12 apples`` or, where ``answer_format`` is `any` and there is no such answer, be the letter or
    end in one in parentheses. Two letters are no answer.
    """
    if isinstance(answer, int) and not isinstance(answer, bool):
        expected = choices[answer] if 0 <= answer < len(choices) else None
    else:
        expected = _letter(str(answer), choices)
    if expected is None:
        raise ValueError(f"the expected answer {answer!r} is none of the choices {choices}")
    response = after_thinking(text)
    given = find_answer(response, answer_format)
    if given is None and answer_format == "any":
        at_end = re.search(r"\(([A-Za-z])\)[\s.*!]*\Z", response)
        given = at_end[1] if at_end else response
    return correct if given is not None and _letter(given, choices) == expected else incorrect


def _letter(answer: str, choices: str) -> str | None:
    r"""The letter that an answer consists of or starts with: ``B``, ``(b)``, ``\text{B}``, ``**B.** 12 apples``."""
    answer = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", answer).replace("*", "").strip(" $\n\t")
    found = re.fullmatch(r"[(\[]?\s*([A-Za-z])(?:\s*|\s*[)\].:,]\s*(.*))", answer, re.DOTALL)
    if not found or found[1].upper() not in choices:
        return None
    hedge = re.match(rf"(?:and|or|&|/|,)?\s*[(\[]?[{choices}{choices.lower()}](?:[)\].:,]|\s*$)", found[2] or "")
    return None if hedge else found[1].upper()
