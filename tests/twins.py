"""The algorithms a second time, in plain Python: loops over groups, samples and tokens, one number at a time.

A sample is a list of its tokens' values. Numbers are floats, or 0-dim float64 tensors where a test wants a gradient; no
twin sees a packed row, a mask outside of a sample, or a tensor of more than one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

BOUND = 20.0


def exp(x):
    return x.exp() if torch.is_tensor(x) else math.exp(x)


def constant(x) -> float:
    """The number without its gradient."""
    return float(x.detach() if torch.is_tensor(x) else x)


def bounded(x, low: float, high: float):
    return low if x < low else high if x > high else x


def finite(x) -> bool:
    return math.isfinite(constant(x))


def usable(masks: list[list[int]], *logprobs: list[list]) -> list[list[int]]:
    return [
        [int(bool(inside) and all(finite(of[s][t]) for of in logprobs)) for t, inside in enumerate(mask)]
        for s, mask in enumerate(masks)
    ]


# ----------------------------------------------------------------------------------------------------------- advantages


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float], less: int) -> float:
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - less))


def advantages(groups: list[list[float]], baseline: str, scale: str) -> list[list[float]]:
    known = [[(i, reward) for i, reward in enumerate(group) if math.isfinite(reward)] for group in groups]
    every = [reward for group in known for _, reward in group]
    found = [[0.0] * len(group) for group in groups]
    counted = []
    for g, group in enumerate(known):
        for i, reward in group:
            others = [other for j, other in group if j != i]
            if baseline == "group_mean":
                found[g][i] = reward - mean([other for _, other in group])
            elif baseline == "leave_one_out":
                found[g][i] = reward - mean(others) if others else 0.0
            elif baseline == "batch_mean":
                found[g][i] = reward - mean(every)
            else:
                found[g][i] = reward
            counted.append(found[g][i])
    for g, group in enumerate(known):
        rewards = [reward for _, reward in group]
        for i, _ in group:
            if scale.startswith("group_std"):
                if max(rewards) == min(rewards):
                    found[g][i] = 0.0
                else:
                    found[g][i] /= deviation(rewards, 1 if scale == "group_std" else 0) + 1e-6
            elif scale == "batch_std":
                found[g][i] /= deviation(counted, 0) + 1e-6
    return found


# ------------------------------------------------------------------------------------------------------ loss of a token


def log_ratios(logprobs: list[list], old: list[list], masks: list[list[int]], level: str) -> list[list]:
    result = []
    for own, before, mask in zip(logprobs, old, masks, strict=True):
        differences = [a - b if inside else None for a, b, inside in zip(own, before, mask, strict=True)]
        inside = [difference for difference in differences if difference is not None]
        if level == "sequence" and inside:
            differences = [sum(inside) / len(inside) if d is not None else None for d in differences]
        result.append([0.0 if d is None else bounded(d, -BOUND, BOUND) for d in differences])
    return result


def clip(log_ratio, logprob, advantage, low, high, dual=None):
    """Loss, ratio, and whether a bound decided, of one token."""
    ratio = exp(log_ratio)
    plain, held = ratio * advantage, bounded(constant(ratio), 1 - low, 1 + high) * advantage
    gain, clipped = (held, True) if held < plain else (plain, False)
    if dual is not None and advantage < 0 and gain < dual * advantage:
        gain, clipped = dual * advantage, True
    return -gain, constant(ratio), clipped


def cispo(log_ratio, logprob, advantage, low, high, dual=None):
    ratio = constant(exp(log_ratio))
    weight = bounded(ratio, 1 - low, 1 + high)
    return -weight * advantage * logprob, ratio, weight != ratio


def kl(logprob, reference, estimator: str):
    gap = logprob - reference
    if math.isnan(constant(gap)):
        return 0.0
    gap = bounded(gap, -BOUND, BOUND)
    if estimator == "k1":
        return gap
    return gap * gap / 2 if estimator == "k2" else exp(-gap) - 1 + gap


# ------------------------------------------------------------------------------------------------- weights over a batch


def token_weights(masks: list[list[int]], aggregation: str, max_response_tokens: int) -> list[list[float]]:
    weights = [[0.0] * len(mask) for mask in masks]
    with_tokens = [mask for mask in masks if any(mask)]
    for s, mask in enumerate(masks):
        for t, inside in enumerate(mask):
            if inside and aggregation == "token_mean":
                weights[s][t] = 1 / sum(sum(other) for other in masks)
            elif inside and aggregation == "sample_mean":
                weights[s][t] = 1 / len(with_tokens) / sum(mask)
            elif inside:
                weights[s][t] = 1 / len(masks) / max_response_tokens
    return weights


def correction_weights(
    old: list[list[float]],
    sampler: list[list[float]],
    masks: list[list[int]],
    mode: str,
    level: str,
    low: float,
    high: float,
    veto: float,
    normalise: bool,
) -> tuple[list[list[float]], dict[str, float]]:
    weights, outside, vetoed = [], 0, 0
    masks = usable(masks, old, sampler)
    for s, mask in enumerate(masks):
        gaps = {t: old[s][t] - sampler[s][t] for t, inside in enumerate(mask) if inside}
        condemned = veto > 0 and any(math.exp(gap) < veto for gap in gaps.values() if gap < 700)
        vetoed += condemned
        own = [0.0] * len(mask)
        for t, gap in gaps.items():
            log = gap
            if level != "token":
                log = sum(gaps.values()) / (len(gaps) if level == "geometric" else 1)
            weight = math.exp(bounded(log, -BOUND, BOUND))
            out = weight < low or weight > high
            outside += out
            if mode == "truncate":
                weight = bounded(weight, low, high)
            elif out:
                weight = 0.0
            own[t] = 0.0 if condemned else weight
        weights.append(own)
    inside = [w for own, mask in zip(weights, masks, strict=True) for w, i in zip(own, mask, strict=True) if i]
    average = sum(inside) / len(inside) if inside else 0.0
    if normalise and average:
        weights = [[weight / average for weight in own] for own in weights]
    metrics = {
        "weight_mean": average,
        "outside_share": outside / max(1, len(inside)),
        "vetoed_samples": vetoed,
        "effective_sample_size": effective_sample_size(inside),
    }
    return weights, metrics


def effective_sample_size(weights: list[float]) -> float:
    if not weights:
        return 1.0
    squares = sum(weight**2 for weight in weights)
    return sum(weights) ** 2 / squares / len(weights) if squares else 0.0


def mismatch(trainer: list[list[float]], sampler: list[list[float]], masks: list[list[int]]) -> dict[str, float]:
    gaps, probabilities, sequences, unusable = [], [], [], 0
    for own, theirs, mask in zip(trainer, sampler, masks, strict=True):
        of_sample = []
        for a, b, inside in zip(own, theirs, mask, strict=True):
            if inside and not (math.isfinite(a) and math.isfinite(b)):
                unusable += 1
            elif inside:
                of_sample.append(a - b)
                probabilities.append(abs(math.exp(a) - math.exp(b)))
        gaps += of_sample
        if of_sample:
            sequences.append(sum(of_sample))
    held = [bounded(gap, -BOUND, BOUND) for gap in gaps]
    tokens = max(1, len(gaps))
    return {
        "logprob_diff_mean": sum(abs(gap) for gap in gaps) / tokens,
        "logprob_diff_max": max((abs(gap) for gap in gaps), default=0.0),
        "probability_diff_mean": sum(probabilities) / tokens,
        "probability_diff_max": max(probabilities, default=0.0),
        "mismatch_k3": sum(math.exp(gap) - 1 - gap for gap in held) / tokens,
        "effective_sample_size_tokens": effective_sample_size([math.exp(gap - max(gaps)) for gap in gaps]),
        "effective_sample_size_sequences": effective_sample_size([math.exp(gap - max(sequences)) for gap in sequences]),
        "unusable_tokens": unusable,
    }


# ------------------------------------------------------------------------------------------------------------- gradients


def gradient(function: Callable[[list[list]], object], values: list[list[float]]) -> list[list[float]]:
    """Derivative of `function` (to one number) by every one of `values`, by autograd over scalars in float64."""
    leaves = [[torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in own] for own in values]
    flat = [leaf for own in leaves for leaf in own]
    result = function(leaves)
    if not (flat and torch.is_tensor(result) and result.requires_grad):
        return [[0.0] * len(own) for own in values]
    found = iter(torch.autograd.grad(result, flat, allow_unused=True))
    return [[0.0 if (value := next(found)) is None else float(value) for _ in own] for own in values]


def finite_differences(
    function: Callable[[list[list[float]]], float], values: list[list[float]], step: float = 1e-5
) -> list[list[float]]:
    """The same from central differences of floats."""
    found = []
    for s, own in enumerate(values):
        found.append([])
        for t in range(len(own)):
            ends = []
            for by in (step, -step):
                moved = [list(other) for other in values]
                moved[s][t] += by
                ends.append(function(moved))
            found[-1].append((ends[0] - ends[1]) / (2 * step))
    return found
