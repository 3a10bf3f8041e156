"""Rewards over all responses to a prompt: what one of them is worth depends on the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rl_tpu.rewards.extract import after_thinking, find_answer
from rl_tpu.rewards.numeric import plain_number
from rl_tpu.rewards.registry import Response, takes_group
from rl_tpu.types import Prompt


@takes_group
def majority(responses: list[Response], answer: Any, prompt: Prompt) -> list[float]:
    """1 for the answer that most responses give, else 0; needs no expected answer (TTRL, arXiv 2504.16084).

    Of answers given equally often the first one counts. Numbers are equal in any spelling, other answers letter by letter.
    """
    answers = [voted_answer(response.text) for response in responses]
    counts = Counter(found for found in answers if found is not None)
    if not counts:
        return [0.0] * len(responses)
    winner = counts.most_common(1)[0][0]
    return [float(found == winner) for found in answers]


@takes_group
def diversity(responses: list[Response], answer: Any, prompt: Prompt) -> list[float]:
    """The share of the other responses that answer differently: 0 if all agree, 1 for an answer that nobody else gives.

    No answer at all is worth 0.
    """
    answers = [voted_answer(response.text) for response in responses]
    counts = Counter(answers)
    others = max(1, len(answers) - 1)
    return [0.0 if found is None else (len(answers) - counts[found]) / others for found in answers]


@takes_group
def length_rank(responses: list[Response], answer: Any, prompt: Prompt, *, penalty: float = 1.0) -> list[float]:
    """0 for the shorter half of the range of lengths (in tokens), falling to -``penalty`` / 2 for the longest response.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) as it has it for wrong answers; here nobody is
    rewarded for being short.
    """
    lengths = [response.tokens for response in responses]
    spread = max(lengths) - min(lengths)
    if not spread:
        return [0.0] * len(responses)
    return [penalty * min(0.0, 0.5 - (tokens - min(lengths)) / spread) for tokens in lengths]


def voted_answer(text: str) -> Any:
    """The answer that a response votes for: a number, or what it wrote as its answer; None if it gives none."""
    found = find_answer(after_thinking(text))
    number = plain_number(found) if found is not None else None
    return number[0] if number else found
