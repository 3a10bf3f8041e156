"""From scored groups to the batches a step learns from: log-probabilities, shaped rewards, advantages, corrections."""

from __future__ import annotations

import math

import torch

from rl_tpu.algorithms.advantages import advantages
from rl_tpu.algorithms.corrections import correction_weights
from rl_tpu.algorithms.credit import returns_to_go, turn_advantages
from rl_tpu.algorithms.kl import kl
from rl_tpu.algorithms.masked import masked, usable_tokens
from rl_tpu.algorithms.mismatch import mismatch_metrics
from rl_tpu.algorithms.overlong import soft_overlong_penalty
from rl_tpu.config.schema import RunConfig
from rl_tpu.trainer.group import TrainerGroup
from rl_tpu.trainer.packing import pack, per_sample_sums, spread, spread_over_turns
from rl_tpu.types import Group, PackedBatch, Sample, Turn

ADDED_PARTS = ("kl", "overlong")
"""Parts of a reward that are added here."""


async def make_experience(
    groups: list[Group], config: RunConfig, trainer: TrainerGroup
) -> tuple[list[PackedBatch], dict[str, float]]:
    """The step's minibatches, whole, and metrics of what was done to rewards and log-probabilities.

    Fills `advantage` of every sample, and adds to `reward` and `reward_parts` what `config.algorithm` adds to rewards.
    """
    algorithm, metrics = config.algorithm, {}
    parts = _minibatches(groups, config)
    batches = [
        pack(
            part,
            config.trainer.row_tokens,
            config.data_ranks,
            config.trainer.microbatch_tokens,
            share_prompts=config.trainer.share_prompts,
        )
        for part in parts
    ]
    if algorithm.old_logprobs == "recompute":
        for batch, old in zip(batches, await trainer.logprobs(batches), strict=True):
            batch.old_logprobs = old
    if algorithm.kl.coefficient:
        for batch, reference in zip(batches, await trainer.logprobs(batches, reference=True), strict=True):
            batch.reference_logprobs = reference
        if algorithm.kl.place == "reward":
            metrics |= _subtract_kl(parts, batches, config)
    metrics |= shape_rewards(groups, config)
    for part, batch in zip(parts, batches, strict=True):
        if algorithm.credit == "turn":
            batch.advantages = spread_over_turns(part, batch)
        else:
            batch.advantages = spread([sample.advantage for sample in part], batch)
    if algorithm.old_logprobs == "recompute":
        metrics |= _correct(batches, config)
    return batches, metrics


def shape_rewards(groups: list[Group], config: RunConfig) -> dict[str, float]:
    """Subtract the soft overlong penalty, then turn the rewards of the batch into advantages.

    The penalty is no part of what was solved: `rollout_metrics` are of the rewards before it, its mean is returned.
    """
    algorithm = config.algorithm
    samples = [sample for group in groups for sample in group.samples]
    metrics = {}
    if algorithm.overlong_buffer_tokens:
        penalties = [_add_overlong_penalty(sample, config) for sample in samples]
        metrics["reward/overlong_mean"] = sum(penalties) / len(penalties)
    if algorithm.credit == "turn":
        spread_of = _credit_turns(groups, config)
    else:
        of_groups = advantages([group.rewards for group in groups], algorithm.baseline, algorithm.scale)
        for group, values in zip(groups, of_groups, strict=True):
            for sample, advantage in zip(group.samples, values, strict=True):
                sample.advantage = advantage
        spread_of = [sample.advantage for sample in samples]
    return metrics | {
        "reward/nonfinite_count": float(sum(not math.isfinite(sample.reward) for sample in samples)),
        "train/advantage_max": max(spread_of),
        "train/advantage_min": min(spread_of),
    }


def _credit_turns(groups: list[Group], config: RunConfig) -> list[float]:
    """Fill the `advantage` of every turn, and of every sample the mean over its tokens; the advantages of all turns."""
    for sample in (sample for group in groups for sample in group.samples):
        if not sample.turns:  # an environment that knows no turns: the response is one
            sample.turns = [Turn(0, len(sample.response_ids))]
    returns = [
        [returns_to_go(sample.reward, [turn.reward for turn in sample.turns]) for sample in group.samples]
        for group in groups
    ]
    found = turn_advantages(returns, config.algorithm.baseline, config.algorithm.scale)
    for group, of_group in zip(groups, found, strict=True):
        for sample, of_turns in zip(group.samples, of_group, strict=True):
            for turn, advantage in zip(sample.turns, of_turns, strict=True):
                turn.advantage = advantage
            tokens = sum(turn.end - turn.start for turn in sample.turns)
            weighed = sum((turn.end - turn.start) * turn.advantage for turn in sample.turns)
            sample.advantage = weighed / tokens if tokens else 0.0
    return [advantage for of_group in found for of_turns in of_group for advantage in of_turns]


def _minibatches(groups: list[Group], config: RunConfig) -> list[list[Sample]]:
    """The step's samples cut into parts of equal sample count."""
    samples = [sample for group in groups for sample in group.samples]
    size = len(samples) // config.algorithm.minibatches
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _subtract_kl(parts: list[list[Sample]], batches: list[PackedBatch], config: RunConfig) -> dict[str, float]:
    """Subtract from every sample's reward its distance from the reference policy, summed over its tokens."""
    penalties = []
    for part, batch in zip(parts, batches, strict=True):
        divergence = kl(batch.old_logprobs, batch.reference_logprobs, config.algorithm.kl.estimator)
        divergence = masked(divergence, usable_tokens(batch.loss_mask, batch.old_logprobs, batch.reference_logprobs))
        for sample, distance in zip(part, per_sample_sums(divergence, batch, len(part)).tolist(), strict=True):
            penalty = -config.algorithm.kl.coefficient * distance
            sample.reward_parts["kl"] = penalty
            sample.reward += penalty
            penalties.append(penalty)
    return {"reward/kl_mean": sum(penalties) / len(penalties)}


def _add_overlong_penalty(sample: Sample, config: RunConfig) -> float:
    penalty = soft_overlong_penalty(
        len(sample.response_ids),
        config.rollout.max_response_tokens,
        config.algorithm.overlong_buffer_tokens,
        config.algorithm.overlong_penalty,
    )
    sample.reward_parts["overlong"] = penalty
    sample.reward += penalty
    return penalty


def _correct(batches: list[PackedBatch], config: RunConfig) -> dict[str, float]:
    """Compare the trainer's log-probabilities with the engine's, and multiply every token's advantage by the importance
    weight between the two, as `algorithm.correction` says.

    Weights are not negative and the objectives linear in the advantage as long as its sign stays: this weighs the token's
    policy loss and leaves KL and entropy alone.
    """
    correction = config.algorithm.correction
    given = _joined(batches)
    metrics = {f"train/{name}": value for name, value in mismatch_metrics(*given).items()}
    if correction.mode == "none":
        return metrics
    weighed = correction_weights(*given, **correction.model_dump())
    sizes = [batch.loss_mask.numel() for batch in batches]
    for batch, weights in zip(batches, weighed.weights.flatten().split(sizes), strict=True):
        batch.advantages *= weights.view_as(batch.advantages)
    return metrics | {f"train/correction_{name}": value for name, value in weighed.metrics.items()}


def _joined(batches: list[PackedBatch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Old and sampler log-probabilities, mask and sample ids of all batches as one row each, [1, tokens]."""
    samples, sample_ids = 0, []
    for batch in batches:
        sample_ids.append(torch.where(batch.sample_ids > 0, batch.sample_ids + samples, 0).flatten())
        samples += int(batch.sample_ids.max())
    columns = [
        [tensor.flatten() for tensor in (batch.old_logprobs, batch.sampler_logprobs, batch.loss_mask)]
        for batch in batches
    ]
    old, sampler, mask = (torch.cat(parts).unsqueeze(0) for parts in zip(*columns, strict=True))
    return old, sampler, mask, torch.cat(sample_ids).unsqueeze(0)
