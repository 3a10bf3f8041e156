"""The objectives of the presets as their papers print them, over samples and tokens, one number at a time.

Numbers are floats, or 0-dim tensors where a gradient is wanted: of parts by themselves (tests/algorithms), or of the
parameters of a whole policy (tests/trainer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import twins
from twins import exp

OVERLONG_BUFFER = 4


@dataclass
class Case:
    """A batch; `groups` name the samples of each prompt."""

    groups: list[list[int]]
    rewards: list[float]
    masks: list[list[int]]
    logprobs: list[list[float]]
    old: list[list[float]]
    reference: list[list[float]]
    max_response_tokens: int

    def tokens(self, sample: int) -> list[int]:
        """Where the policy wrote."""
        return [t for t, inside in enumerate(self.masks[sample]) if inside]


def group_normalised(case: Case, rewards: list[float]) -> dict[int, float]:
    found = {}
    for group in case.groups:
        own = [rewards[i] for i in group]
        for i in group:
            uniform = len(set(own)) == 1
            found[i] = 0.0 if uniform else (rewards[i] - twins.mean(own)) / (twins.deviation(own, 1) + 1e-6)
    return found


def surrogate(ratio, advantage: float, low: float, high: float):
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A)."""
    held = twins.bounded(ratio, 1 - low, 1 + high) * advantage
    plain = ratio * advantage
    return held if held < plain else plain


def grpo(case: Case, logprobs: list[list]):
    """arXiv 2402.03300, eq. 3 and 4: the mean over answers of the mean over their tokens, beta times KL in the loss."""
    advantage, terms = group_normalised(case, case.rewards), []
    for i in range(len(case.rewards)):
        own = 0.0
        for t in case.tokens(i):
            ratio = exp(logprobs[i][t] - case.old[i][t])
            gap = case.reference[i][t] - logprobs[i][t]
            own += surrogate(ratio, advantage[i], 0.2, 0.2) - 0.04 * (exp(gap) - gap - 1)
        if case.tokens(i):
            terms.append(own / len(case.tokens(i)))
    return -sum(terms) / len(terms)


def token_mean(case: Case, logprobs: list[list], advantage: dict[int, float], low: float, high: float):
    total, count = 0.0, 0
    for i in range(len(case.rewards)):
        for t in case.tokens(i):
            total += surrogate(exp(logprobs[i][t] - case.old[i][t]), advantage[i], low, high)
            count += 1
    return -total / count


def grpo_of_today(case: Case, logprobs: list[list]):
    return token_mean(case, logprobs, group_normalised(case, case.rewards), 0.2, 0.2)


def dapo(case: Case, logprobs: list[list]):
    """arXiv 2503.14476, eq. 8 and 13: 1 / all tokens, clip 0.2 and 0.28, rewards less a soft overlong penalty."""
    rewards = []
    for i, own in enumerate(case.masks):
        free = case.max_response_tokens - OVERLONG_BUFFER
        penalty = 0 if len(own) <= free else (free - len(own)) / OVERLONG_BUFFER
        rewards.append(case.rewards[i] + penalty)
    return token_mean(case, logprobs, group_normalised(case, rewards), 0.2, 0.28)


def dr_grpo(case: Case, logprobs: list[list]):
    """arXiv 2503.20783, section 3.2: neither the group's deviation nor the answer's length divides anything."""
    total = 0.0
    for group in case.groups:
        for i in group:
            advantage = case.rewards[i] - twins.mean([case.rewards[j] for j in group])
            for t in case.tokens(i):
                ratio = exp(logprobs[i][t] - case.old[i][t])
                total += surrogate(ratio, advantage, 0.2, 0.2) / case.max_response_tokens
    return -total / len(case.rewards)


def gspo(case: Case, logprobs: list[list]):
    """arXiv 2507.18071, eq. 5 and 7: one ratio for an answer, the geometric mean over its tokens."""
    advantage, terms = group_normalised(case, case.rewards), []
    for i in range(len(case.rewards)):
        if tokens := case.tokens(i):
            ratio = exp(sum(logprobs[i][t] - case.old[i][t] for t in tokens) / len(tokens))
            terms.append(surrogate(ratio, advantage[i], 3e-4, 4e-4))
    return -sum(terms) / len(terms)


def cispo(case: Case, logprobs: list[list]):
    """arXiv 2506.13585, eq. 4 and 5: the ratio, bounded above and without gradient, weighs the log-probability."""
    advantage, total, count = group_normalised(case, case.rewards), 0.0, 0
    for i in range(len(case.rewards)):
        for t in case.tokens(i):
            weight = min(math.exp(twins.constant(logprobs[i][t]) - case.old[i][t]), 1 + 4.0)
            total += weight * advantage[i] * logprobs[i][t]
            count += 1
    return -total / count


def rloo(case: Case, logprobs: list[list]):
    """arXiv 2402.14740: reward minus the mean of the other answers, times the log-probability of the whole answer. The
    constant number of tokens is ours."""
    total = 0.0
    for group in case.groups:
        for i in group:
            others = [case.rewards[j] for j in group if j != i]
            advantage = case.rewards[i] - twins.mean(others) if others else 0.0
            total += advantage * sum(logprobs[i][t] for t in case.tokens(i))
    return -total / len(case.rewards) / case.max_response_tokens


def reinforce_pp(case: Case, logprobs: list[list]):
    """arXiv 2501.03262: rewards less the divergence from the reference, normalised over the whole batch; PPO's clip."""
    shaped = [
        reward - 0.01 * sum(case.old[i][t] - case.reference[i][t] for t in case.tokens(i))
        for i, reward in enumerate(case.rewards)
    ]
    middle, spread = twins.mean(shaped), twins.deviation(shaped, 0)
    advantage = {i: (reward - middle) / (spread + 1e-6) for i, reward in enumerate(shaped)}
    return token_mean(case, logprobs, advantage, 0.2, 0.2)


PAPERS: dict[str, tuple[str, Callable, tuple[str, ...]]] = {
    "grpo": ("grpo", grpo_of_today, ()),
    "grpo as published": ("grpo", grpo, ("algorithm.aggregation=sample_mean", "algorithm.kl.coefficient=0.04")),
    "dapo": ("dapo", dapo, ()),
    "dr_grpo": ("dr_grpo", dr_grpo, ()),
    "gspo": ("gspo", gspo, ()),
    "cispo": ("cispo", cispo, ()),
    "reinforce_pp": ("reinforce_pp", reinforce_pp, ()),
}
