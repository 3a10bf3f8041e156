"""A reward of a whole group: answers that differ from the others' are worth a little more."""

from __future__ import annotations

from typing import Any

from rl_tpu.rewards import Response, takes_group
from rl_tpu.types import Prompt


@takes_group
def score(responses: list[Response], answer: Any, prompt: Prompt) -> list[float]:
    """The share of a response's distinct words that no other response to the prompt has."""
    words = [set(response.text.split()) for response in responses]
    others = [set().union(*words[:index], *words[index + 1 :]) for index in range(len(words))]
    return [len(own - rest) / len(own) if own else 0.0 for own, rest in zip(words, others, strict=True)]
