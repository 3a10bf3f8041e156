"""From rewards to a loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Count, NonNegative, Positive, Section


class KLConfig(Section):
    """Distance from a frozen reference policy."""

    coefficient: NonNegative = 0.0
    """Weight of the distance; 0 does without a reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token, with d = logprob of the policy - logprob of the reference: d (`k1`),
    d^2 / 2 (`k2`), exp(-d) - 1 + d (`k3`)."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss of every token, or subtracted from a sample's reward (summed over its tokens) before
    advantages."""
    refresh_steps: Count = 0
    """Steps after which the policy becomes the new reference; 0 keeps the first one."""


class CorrectionConfig(Section):
    """Importance weights between the engine that wrote the samples and the trainer's policy of the same version.

    The weight is exp(old logprob - sampler logprob); it multiplies the loss of a token. Needs
    `algorithm.old_logprobs=recompute`.
    """

    mode: Literal["none", "truncate", "mask"] = "none"
    """Weights are held within low and high (`truncate`), or tokens outside leave the loss (`mask`)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight for every token, the product of a sample's tokens for all of them, or their geometric mean."""
    low: NonNegative = 0.5
    """Lowest weight."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Highest weight."""
    veto: NonNegative = 0.0
    """A sample with a token whose weight is below this leaves the loss whole; 0 never does."""
    normalise: bool = False
    """Divide by the mean weight of the whole batch."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """What is subtracted from a reward: the mean of its group, the mean of the others in its group (RLOO), the mean of
    the whole batch (REINFORCE++), nothing."""
    scale: Literal["none", "group_std", "group_std_population", "batch_std"] = "group_std"
    """What that is divided by: nothing (Dr. GRPO), the standard deviation of the group's rewards with divisor n - 1 or n
    (GRPO), the standard deviation of the whole batch's advantages; each + 1e-6."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whose reward a token's advantage is of: the whole sample's, or, of several turns, what was earned from its turn on,
    compared with the same turn of the group's other samples."""
    ratio: Literal["token", "sequence"] = "token"
    """The importance ratio is each token's, or the geometric mean over its sample (GSPO)."""
    objective: str = "clip"
    """What is done with ratio and advantage: `clip` (PPO), `cispo` (clipped weight without gradient on the
    log-probability), or an import path `package.module:function`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratio is clipped above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With negative advantages the loss is at most so many times the advantage; null: no second bound."""
    aggregation: Literal["token_mean", "sample_mean", "constant_length"] = "token_mean"
    """Mean over all tokens of the minibatch (DAPO), over each sample first (GRPO as published), or the sum divided by
    samples times max_response_tokens (Dr. GRPO)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, subtracted from the loss."""
    kl: KLConfig = KLConfig()
    """Distance from a reference policy."""
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """What the ratio compares with: the engine's log-probabilities, or the trainer's own before the first update of the
    step (one more forward)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction for the difference between engine and trainer."""
    minibatches: Positive = 1
    """Optimizer steps per pass over a rollout step's batch: it is cut into so many parts of equal sample count."""
    epochs: Positive = 1
    """Passes over the batch of a rollout step."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """A minibatch whose mean divergence from the old policy (k3) exceeds this makes no update and ends the step's updates;
    null: never."""
    drop_uniform_groups: bool = False
    """Dynamic sampling: groups whose rewards are all equal teach nothing; drop them and generate others."""
    max_generation_batches: Positive = 10
    """With drop_uniform_groups: prompts drawn for one step are at most this many times prompts_per_step; then the step
    goes on with what it has."""
    overlong_buffer_tokens: Count = 0
    """Soft overlong penalty (DAPO): over the last so many tokens before max_response_tokens the reward falls linearly."""
    overlong_penalty: NonNegative = 1.0
    """Largest soft overlong penalty, subtracted at full length."""
