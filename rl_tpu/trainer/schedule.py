"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_factor(
    step: int,
    warmup_steps: int,
    total_steps: int,
    decay: Literal["constant", "linear", "cosine"],
    final_share: float = 0.0,
) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0): a linear rise over the warm-up, whose last step
    has the peak, then a fall that would reach `final_share` at `total_steps`. A step that was skipped is none."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return final_share + (1 - final_share) * left
