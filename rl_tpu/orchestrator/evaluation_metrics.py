"""What an evaluation set looks like in numbers: scores of every prompt, and over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from rl_tpu.algorithms.majority_vote import majority_solved
from rl_tpu.algorithms.pass_at_k import pass_at_k
from rl_tpu.algorithms.statistics import share_interval
from rl_tpu.rewards.extract import final_answer
from rl_tpu.rewards.group import voted_answer
from rl_tpu.tracking.rollout_metrics import SOLVED
from rl_tpu.types import Group

Scores = dict[str, float]
"""Of one prompt, by the name of the metric that is their mean over prompts."""


def prompt_scores(group: Group) -> Scores:
    """How the n samples of one prompt did.

    reward_mean           their mean reward
    pass@1, 2, 4, ... n   chance that one of so many samples is solved, without bias (`pass_at_k`)
    maj@n                 from two samples on: chance that the answer most of them give is right (`majority_solved`)
    response_tokens_mean  tokens after the prompt
    """
    samples, n = group.samples, len(group.samples)
    solved = [sample.reward >= SOLVED for sample in samples]
    scores = {"reward_mean": fmean(group.rewards)}
    for k in _powers_of_two(n):
        scores[f"pass@{k}"] = pass_at_k(n, sum(solved), k)
    if n > 1:
        scores[f"maj@{n}"] = majority_solved([_vote(sample.text) for sample in samples], solved)
    return scores | {"response_tokens_mean": fmean(len(sample.response_ids) for sample in samples)}


def evaluation_metrics(groups: Sequence[Group], scores: Sequence[Scores], confidence: float) -> dict[str, float]:
    """Of groups of n samples each: the means of the prompts' ``scores``, and

    mean@n                        pass@1 by the name that says how many samples are behind it, for n > 1
    pass@1_{low,high}             its confidence interval: for any prompt of that kind, not for these alone
    response_tokens_{p50,p90,max} over all samples
    truncated_share               samples cut at the length limit
    reward_error_count            samples whose reward could not be computed
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics = {name: fmean(each[name] for each in scores) for name in scores[0]}
    if (n := len(groups[0].samples)) > 1:
        metrics[f"mean@{n}"] = metrics["pass@1"]
    low, high = share_interval([each["pass@1"] for each in scores], confidence)
    lengths = np.array([len(sample.response_ids) for sample in samples])
    return metrics | {
        "pass@1_low": low,
        "pass@1_high": high,
        "response_tokens_p50": float(np.percentile(lengths, 50)),
        "response_tokens_p90": float(np.percentile(lengths, 90)),
        "response_tokens_max": float(lengths.max()),
        "truncated_share": fmean(sample.finish_reason == "length" for sample in samples),
        "reward_error_count": float(sum(sample.reward_error is not None for sample in samples)),
    }


def _powers_of_two(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and ``largest`` itself."""
    k = 1
    while k < largest:
        yield k
        k *= 2
    yield largest


def _vote(text: str) -> Any:
    """What a sample votes for: the answer that it marks as such, else all that it shows; None if that is nothing."""
    answer = voted_answer(text)
    return answer if answer is not None else final_answer(text) or None
