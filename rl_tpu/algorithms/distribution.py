"""The distribution that tokens were sampled from, which is the one that their log-probabilities belong to."""

from __future__ import annotations

from dataclasses import dataclass

from rl_tpu.types import SUPPORT_TOKENS


@dataclass(frozen=True)
class Distribution:
    """softmax(logits / temperature), truncated as SGLang does and renormalised: of the tokens in order of their
    probability the `top_k` first (-1: all) are kept, and those before which at most `top_p` of the probability lies, and
    which are at least `min_p` times as likely as the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def support(self) -> int:
        """How many tokens the truncated distribution has at most."""
        return self.top_k if 0 < self.top_k < SUPPORT_TOKENS else SUPPORT_TOKENS
