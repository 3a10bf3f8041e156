"""Several optimizer steps per batch: passes, early stops, steps without a finite gradient, tokens that cannot be used."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_policy import make_samples, one_rank, tiny_qwen3, transformers_logprobs

from rl_tpu.config.schema import AlgorithmConfig, KLConfig
from rl_tpu.errors import RunError
from rl_tpu.trainer.packing import pack
from rl_tpu.types import PackedBatch, Sample


def on_policy(count: int, seed: int = 0) -> list[Sample]:
    """Samples whose given log-probabilities are the tiny policy's own."""
    samples, model = make_samples(count, seed), tiny_qwen3(True)
    for sample in samples:
        sample.logprobs = transformers_logprobs(model, sample)
    return samples


def minibatches(count: int) -> list[PackedBatch]:
    samples = on_policy(4 * count)
    return [pack(samples[start : start + 4], [128]) for start in range(0, len(samples), 4)]


def test_every_pass_makes_a_step_for_every_minibatch(model_dir):
    batches = minibatches(2)
    with one_rank(model_dir, AlgorithmConfig(epochs=3)) as trainer:
        steps = trainer.learn(batches)
        learnt = trainer.full_tensors()
        assert trainer.optimizer.schedule.schedulers[0].last_epoch == 6
    with one_rank(model_dir) as trainer:
        one_by_one = [trainer.update(batch) for _ in range(3) for batch in batches]
        same = trainer.full_tensors()
    assert [step["train/loss"] for step in steps] == [step["train/loss"] for step in one_by_one]
    assert all(torch.equal(learnt[name], same[name]) for name in same)
    assert steps[0]["train/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert steps[2]["train/ratio_max"] > 1.001, "the second pass is off-policy"


def test_a_policy_too_far_from_the_old_one_ends_the_updates(model_dir):
    batches = minibatches(2)
    with one_rank(model_dir, AlgorithmConfig(epochs=50, max_kl=0.02, clip_low=0.9, clip_high=9.0)) as trainer:
        steps = trainer.learn(batches)
    with one_rank(model_dir, AlgorithmConfig(clip_low=0.9, clip_high=9.0)) as trainer:
        for step in range(len(steps) - 1):
            trainer.update(batches[step % 2])
        before = trainer.full_tensors()
    assert 1 < len(steps) < 100
    assert [step["train/early_stops"] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1]["train/approx_kl"] > 0.02 >= max(step["train/approx_kl"] for step in steps[:-1])
    with one_rank(model_dir, AlgorithmConfig(epochs=50, max_kl=0.02, clip_low=0.9, clip_high=9.0)) as trainer:
        trainer.learn(batches)
        after = trainer.full_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before), "the step that stopped changed nothing"


def test_steps_without_a_finite_gradient_are_skipped_counted_and_bounded(model_dir):
    (batch,) = minibatches(1)
    batch.advantages *= 1e38
    batch.advantages *= 1e38
    with one_rank(model_dir, max_skipped_updates=3) as trainer:
        before = trainer.full_tensors()
        skipped = [trainer.update(batch) for _ in range(2)]
        (good,) = minibatches(1)
        with pytest.raises(RunError, match=r"not finite in 3 updates in a row \(trainer.max_skipped_updates\)"):
            trainer.update(batch)
        after = trainer.full_tensors()
        assert trainer.update(good)["train/skipped_updates"] == 0
    assert [step["train/skipped_updates"] for step in skipped] == [1.0, 1.0]
    assert not math.isfinite(skipped[0]["train/grad_norm"])
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("where", ["sampler_logprobs", "old_logprobs", "reference_logprobs"])
def test_tokens_without_a_finite_logprob_are_left_out_and_counted(model_dir, bad, where):
    samples = on_policy(4)
    batch, without = pack(samples, [128]), pack(samples, [128])
    rows, places = batch.loss_mask.nonzero(as_tuple=True)
    for each in (batch, without):
        each.reference_logprobs = each.sampler_logprobs.clone()
    for token in (0, 7, 20):
        getattr(batch, where)[rows[token], places[token]] = bad
        without.loss_mask[rows[token], places[token]] = 0
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1), aggregation="sample_mean")
    with one_rank(model_dir, algorithm) as trainer:
        excluded = trainer.update(batch)
    with one_rank(model_dir, algorithm) as trainer:
        expected = trainer.update(without)
    assert excluded["train/excluded_tokens"] == 3
    assert expected["train/excluded_tokens"] == 0
    for name in ("loss", "grad_norm", "loss_tokens", "approx_kl", "logprob_diff_max", "reference_kl"):
        assert excluded[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=1e-6, abs=1e-9), name


def test_a_batch_of_which_nothing_is_to_be_learnt_changes_nothing_but_the_decay(model_dir):
    (batch,) = minibatches(1)
    batch.loss_mask.zero_()
    with one_rank(model_dir) as trainer:
        before = trainer.full_tensors()
        metrics = trainer.update(batch)
        after = trainer.full_tensors()
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/loss_tokens"] == 0
    for name, tensor in before.items():
        left = 1 - 1e-3 * 0.1 if tensor.ndim > 1 else 1  # learning rate x weight decay
        torch.testing.assert_close(after[name], tensor * left, rtol=1e-6, atol=0)


def test_a_step_that_is_too_far_is_not_counted_as_skipped_too(model_dir):
    with one_rank(model_dir) as trainer:
        for parameter in trainer.policy.model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        assert trainer.optimizer.step(apply=False)["skipped_updates"] == 0


def test_the_entropy_bonus_raises_entropy(model_dir):
    batches = minibatches(1)
    batches[0].advantages.zero_()
    entropies = {}
    for coefficient in (0.1, -0.1):
        with one_rank(model_dir, AlgorithmConfig(entropy_coefficient=coefficient, epochs=5)) as trainer:
            entropies[coefficient] = [step["train/entropy"] for step in trainer.learn(batches)]
    assert entropies[0.1] == sorted(entropies[0.1])
    assert entropies[-0.1] == sorted(entropies[-0.1], reverse=True)
