"""Which groups teach something."""

from __future__ import annotations

import math
from collections.abc import Sequence


def is_uniform(rewards: Sequence[float]) -> bool:
    """True if all rewards of a group are equal: every advantage is 0 (dynamic sampling, DAPO, arXiv 2503.14476 3.2).

    Rewards that are no finite numbers count for nothing, as in `advantages`.
    """
    finite = [reward for reward in rewards if math.isfinite(reward)]
    return len(set(finite)) <= 1
