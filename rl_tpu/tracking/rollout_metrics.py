"""What a batch of groups looks like in numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from rl_tpu.types import Group, Sample

SOLVED = 1.0
"""Reward from which on a sample counts as solved."""


def rollout_metrics(groups: list[Group], trained_version: int | None = None) -> dict[str, float]:
    """Statistics of the samples of one step; every mean is over samples, every ``*_share`` lies in [0, 1].

    rollout/{prompts,samples,total_tokens}    how many groups, samples, and tokens (prompt and response, of all samples)
    rollout/response_tokens_{mean,max}        tokens written after the prompt, by the policy or an environment
    rollout/response_tokens_{p50,p90,p99}     at most so many in half, in 90 %, in 99 % of the samples
    rollout/response_tokens_max_to_mean       how long the tail is: 1 if all are equally long
    rollout/prompt_tokens_mean
    rollout/cached_prompt_share               of all samples' prompt tokens, those that engines had read before
    rollout/truncated_share                   samples cut at the length limit
    rollout/uniform_group_share               groups whose rewards are all equal: no advantage, nothing learnt
    rollout/solve_all, rollout/solve_none     share of groups in which every sample, or none, has a reward >= 1
    rollout/version_{min,max}                 oldest and newest policy that wrote any of it
    rollout/mixed_version_share               samples written by more than one policy version
    rollout/staleness_{mean,max}              ``trained_version`` minus the oldest version of the sample, if it is given
    rollout/token_staleness_{mean,max}        ``trained_version`` minus the version that wrote it, over the policy's tokens
    reward/{mean,std,max,min}                 std is the population's, over all samples
    reward/PART_mean                          over the samples that have that part
    reward/error_count                        samples whose reward could not be computed
    environment/NAME                          mean of what the environment counted, over the samples that have it

    The collector adds how the batch came about:

    rollout/group_s_{p50,max}                 seconds from when a group's prompt was drawn until the group was ready
    rollout/tail_wait_s                       for how long the step waited after 90 % of its groups were ready
    rollout/carried_groups                    groups of the batch whose prompts were drawn under an earlier policy
    rollout/{in_flight,ready}_groups          left for later steps when the batch was taken
    rollout/dropped_groups                    uniform groups since the batch before that dynamic sampling dropped
    rollout/dropped_stale_groups              groups since the batch before that stale_groups=drop dropped, finished or not
    rollout/stale_share                       samples older than max_staleness, with stale_groups=correct
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {"rollout/prompts": len(groups), "rollout/samples": 0}
    rewards = [sample.reward for sample in samples]
    responses = [len(sample.response_ids) for sample in samples]
    metrics = {
        "rollout/prompts": len(groups),
        "rollout/samples": len(samples),
        "rollout/total_tokens": sum(sample.total_tokens for sample in samples),
        "rollout/response_tokens_mean": fmean(responses),
        "rollout/response_tokens_max": max(responses),
        **{f"rollout/response_tokens_p{share}": quantile(responses, share / 100) for share in (50, 90, 99)},
        "rollout/response_tokens_max_to_mean": max(responses) / max(1.0, fmean(responses)),
        "rollout/prompt_tokens_mean": fmean(len(sample.prompt_ids) for sample in samples),
        "rollout/cached_prompt_share": sum(sample.cached_prompt_tokens for sample in samples)
        / sum(len(sample.prompt_ids) for sample in samples),
        "rollout/truncated_share": fmean(sample.finish_reason == "length" for sample in samples),
        "rollout/uniform_group_share": fmean(len(set(group.rewards)) == 1 for group in groups),
        "rollout/solve_all": fmean(all(reward >= SOLVED for reward in group.rewards) for group in groups),
        "rollout/solve_none": fmean(not any(reward >= SOLVED for reward in group.rewards) for group in groups),
        "rollout/version_min": min(sample.oldest_version for sample in samples),
        "rollout/version_max": max(sample.newest_version for sample in samples),
        "rollout/mixed_version_share": fmean(s.oldest_version != s.newest_version for s in samples),
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards) if all(map(math.isfinite, rewards)) else math.nan,
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/error_count": sum(sample.reward_error is not None for sample in samples),
    }
    if trained_version is not None:
        staleness = [trained_version - sample.oldest_version for sample in samples]
        metrics |= {"rollout/staleness_mean": fmean(staleness), "rollout/staleness_max": max(staleness)}
        metrics |= _token_staleness(samples, trained_version)
    parts = _means(sample.reward_parts for sample in samples)
    metrics |= {f"reward/{part}_mean": mean for part, mean in parts.items()}
    return metrics | {f"environment/{name}": mean for name, mean in _means(s.measures for s in samples).items()}


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _token_staleness(samples: list[Sample], trained_version: int) -> dict[str, float]:
    tokens: dict[int, int] = defaultdict(int)
    for sample in samples:
        for span in sample.spans:
            tokens[trained_version - span.version] += sum(sample.loss_mask[span.start : span.end])
    written = {lag: count for lag, count in tokens.items() if count}
    if not written:
        return {}
    mean = sum(lag * count for lag, count in written.items()) / sum(written.values())
    return {"rollout/token_staleness_mean": mean, "rollout/token_staleness_max": max(written)}


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: fmean(each) for name, each in values.items()}
