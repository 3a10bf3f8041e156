"""Reward functions by name or import path.

A reward function scores one sample::

    def reward(text: str, answer: Any, prompt: Prompt, **options) -> float | dict[str, float]

``text`` is the decoded response, ``answer`` and ``prompt`` come from the data. A dict holds named parts; the reward is
their sum. It runs in worker processes, one sample at a time, under a deadline (`rl_tpu.rewards.service`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rl_tpu.registry import check_options, lookup

RewardFunction = Callable[..., "float | dict[str, float]"]

REWARDS = {
    "math": "rl_tpu.rewards.mathematics:score",
    "reasoning_gym": "rl_tpu.rewards.reasoning_gym:score",
}


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
