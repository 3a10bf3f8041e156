"""A reward of your own: the right answer counts most, and a right answer in few characters a little more."""

from __future__ import annotations

from typing import Any

from rl_tpu.rewards.extract import final_answer
from rl_tpu.types import Prompt


def score(text: str, answer: Any, prompt: Prompt, *, free_characters: int = 20, bonus: float = 0.2) -> dict[str, float]:
    """Named parts add up to the reward, and each gets a curve of its own.

    `correct` is 1 for the right answer. `concise` is `bonus` for a right answer within `free_characters`, falling to 0 at
    twice as many.
    """
    correct = float(final_answer(text) == str(answer))
    excess = max(0, len(text) - free_characters) / free_characters
    return {"correct": correct, "concise": correct * bonus * max(0.0, 1.0 - excess)}
