"""A reward of your own: the right answer counts most, and a right answer in few words a little more."""

from __future__ import annotations

from typing import Any

from rl_tpu.types import Prompt


def score(text: str, answer: Any, prompt: Prompt, *, free_words: int = 1, bonus: float = 0.2) -> dict[str, float]:
    """Named parts add up to the reward, and each gets a curve of its own.

    `correct` is 1 if the last word is the answer. `concise` is `bonus` for a right answer of at most `free_words` words,
    falling to 0 at twice as many.
    """
    words = text.split()
    correct = float(bool(words) and words[-1] == str(answer))
    excess = max(0, len(words) - free_words) / free_words
    return {"correct": correct, "concise": correct * bonus * max(0.0, 1.0 - excess)}
