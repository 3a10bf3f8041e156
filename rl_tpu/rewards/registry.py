"""Reward functions by name or import path, and what they may look like.

Most score one answer by its text::

    def reward(text: str, answer: Any, prompt: Prompt, **options) -> float | dict[str, float]

``text`` is the decoded response, ``answer`` and ``prompt`` come from the data. A dict holds named parts; the reward is
their sum. `takes_response` hands over a `Response` in place of its text, `takes_group` all responses to the prompt.
Functions run in worker processes under a deadline (`rl_tpu.rewards.service`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_tpu.registry import check_options, lookup

RewardFunction = Callable[..., Any]
Scope = Literal["text", "response", "group"]

REWARDS = {
    "diversity": "rl_tpu.rewards.group:diversity",
    "exact": "rl_tpu.rewards.matching:exact",
    "format": "rl_tpu.rewards.layout:tags",
    "gsm8k": "rl_tpu.rewards.numeric:gsm8k",
    "judge": "rl_tpu.rewards.judge:score",
    "length": "rl_tpu.rewards.layout:length",
    "length_rank": "rl_tpu.rewards.group:length_rank",
    "majority": "rl_tpu.rewards.group:majority",
    "math": "rl_tpu.rewards.mathematics:score",
    "multiple_choice": "rl_tpu.rewards.matching:multiple_choice",
    "reasoning_gym": "rl_tpu.rewards.reasoning_gym:score",
    "regex": "rl_tpu.rewards.matching:regex",
    "remote": "rl_tpu.rewards.remote:score",
    "repetition": "rl_tpu.rewards.layout:repetition",
}


@dataclass(frozen=True)
class Response:
    """What a reward sees of a sample: its decoded text, its length in tokens, and why it ended (`stop`, `length`)."""

    text: str
    tokens: int
    finish_reason: str = "stop"


def takes_response(function: RewardFunction) -> RewardFunction:
    """Marks a reward function whose first argument is a `Response`."""
    function.reward_scope = "response"
    return function


def takes_group(function: RewardFunction) -> RewardFunction:
    """Marks a reward function that scores all responses to a prompt at once.

    Its first argument is ``list[Response]``; it returns one entry for each: a number, named parts, or an exception for a
    response that could not be scored.
    """
    function.reward_scope = "group"
    return function


def scope_of(function: RewardFunction) -> Scope:
    """What the function wants as its first argument."""
    return getattr(function, "reward_scope", "text")


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """The function called ``name``. Raises UserError if there is none or it does not take these options."""
    function = lookup("reward", name, REWARDS)
    check_options("reward", name, function, ("text", "answer", "prompt"), options)
    return function


def reward_parts(returned: Any, default_part: str) -> dict[str, float]:
    """What a reward function returned, as named parts. Raises ValueError unless every part is a finite number.

    A single number becomes the one part ``default_part``: not-a-number would spoil the advantages of its whole group.
    """
    parts = returned if isinstance(returned, Mapping) else {default_part: returned}
    if not parts:
        raise ValueError("returned an empty dict, not a number or named parts")
    checked = {}
    for name, value in parts.items():
        try:
            number = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not isinstance(name, str) or not math.isfinite(number):
            part = f" for part {name!r}" if parts is returned else ""
            raise ValueError(f"returned {value!r}{part}, not a finite number")
        checked[name] = number
    return checked
