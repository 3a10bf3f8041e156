"""From the rewards of one group to advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rl_tpu.algorithms.filters import is_uniform

EPSILON = 1e-6
"""Added to the standard deviation."""


def group_advantages(rewards: Sequence[float], kind: Literal["group_std", "group_mean"]) -> list[float]:
    """One advantage per sample of a group.

    ``group_mean``: reward - mean (Dr. GRPO, arXiv 2503.20783). ``group_std``: that divided by (standard deviation +
    1e-6) (GRPO, arXiv 2402.03300 section 4.1.2); the deviation is the unbiased one (divisor n - 1), as in Miles and
    slime. The mean includes the sample itself: nothing blows up where one sample differs, as in [1, 0, 0, 0]. Equal
    rewards give exactly 0. A reward that is no finite number gets 0 and stays out of the statistics of the others.
    """
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if len(finite) < 2 or is_uniform(finite):
        return [0.0] * len(rewards)
    mean = math.fsum(finite) / len(finite)
    scale = 1.0
    if kind == "group_std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in finite) / (len(finite) - 1)) + EPSILON
    return [(reward - mean) / scale if math.isfinite(reward) else 0.0 for reward in rewards]
