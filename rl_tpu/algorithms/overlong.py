"""Soft overlong punishment."""

from __future__ import annotations


def soft_overlong_penalty(
    response_tokens: int, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """What is added to a reward for length, in [-factor, 0] (DAPO, arXiv 2503.14476 equation 13). Lengths are tokens.

    0 up to ``max_response_tokens - buffer_tokens``, then falling linearly to ``-factor`` at ``max_response_tokens``.
    A buffer of 0 turns it off.
    """
    if buffer_tokens == 0:
        return 0.0
    free_tokens = max_response_tokens - buffer_tokens
    return factor * min(0.0, max(-1.0, (free_tokens - response_tokens) / buffer_tokens))
