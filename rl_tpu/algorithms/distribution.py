"""The distribution that tokens were sampled from, which is the one that their log-probabilities belong to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    """softmax(logits / temperature), cut to its likeliest tokens and renormalised: the `top_k` likeliest (-1: all), then
    those of them before which less than `top_p` of the probability lies."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0
