"""One rank against transformers and against losses computed sample by sample."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_policy import (
    gradients,
    make_samples,
    one_rank,
    predictions,
    supervised_loss,
    tiny_qwen3,
    transformers_logprobs,
)

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.devices import CpuDevice
from rl_tpu.errors import RunError
from rl_tpu.trainer.packing import pack
from rl_tpu.types import PackedBatch, Sample


def worst_difference(
    model, samples: list[Sample], batch: PackedBatch, logprobs: torch.Tensor, temperature=1.0
) -> float:
    return max(
        float((logprobs[predictions(batch, index, sample)] - exact).abs().max())
        for index, sample in enumerate(samples)
        for exact in [torch.tensor(transformers_logprobs(model, sample, temperature))]
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_are_those_of_transformers(model_dirs, tied, temperature):
    samples = make_samples(12)
    batch = pack(samples, [128], 1, 256)
    with one_rank(model_dirs[tied], distribution=Distribution(temperature)) as trainer:
        logprobs = trainer.logprobs(batch)
    assert worst_difference(tiny_qwen3(tied), samples, batch, logprobs, temperature) < 1e-5
    assert (logprobs[batch.labels < 0] == 0).all()


@pytest.fixture
def static_shapes(monkeypatch):
    """As on a device that compiles one program per shape: padded rows, and attention under a mask."""
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", False)


def test_static_shapes_give_the_same_numbers(model_dir, request):
    algorithm = AlgorithmConfig(entropy_coefficient=0.1)
    samples = make_samples(14)
    for sample in samples[3:8]:
        sample.prompt_ids = list(range(20, 35))
    batch = pack(samples, [64], 1, 128, share_prompts=True)
    assert (batch.prefix_ids > 0).any()
    found = []
    for shapes in ("dynamic", "static"):
        if shapes == "static":
            request.getfixturevalue("static_shapes")
        with one_rank(model_dir, algorithm, distribution=Distribution(0.7, top_p=0.9)) as trainer:
            found.append([trainer.logprobs(batch), trainer.backward(batch), gradients(trainer)])
    (logprobs, metrics, slopes), (static_logprobs, static_metrics, static_slopes) = found
    torch.testing.assert_close(static_logprobs, logprobs, rtol=1e-5, atol=1e-5)
    assert static_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, slope in slopes.items():
        torch.testing.assert_close(static_slopes[name], slope, rtol=1e-4, atol=1e-5 * float(slope.abs().max()))


def test_without_the_mask_of_segments_samples_would_see_each_other(model_dir, static_shapes, monkeypatch):
    samples = make_samples(12)
    batch = pack(samples, [128], 1, 256)
    monkeypatch.setattr("rl_tpu.trainer.inputs.segment_mask", causal_only)
    with one_rank(model_dir) as trainer:
        logprobs = trainer.logprobs(batch)
    assert worst_difference(tiny_qwen3(True), samples, batch, logprobs) > 0.1


def causal_only(segment_ids: torch.Tensor, prefix_ids: torch.Tensor) -> torch.Tensor:
    rows, length = segment_ids.shape
    return torch.ones(rows, 1, length, length, dtype=torch.bool).tril()


def with_logprobs_of(model, samples: list[Sample], temperature: float = 1.0, noise: float = 0.0) -> list[Sample]:
    """The samples as an engine with this model would have returned them, off by up to `noise`."""
    generator = torch.Generator().manual_seed(0)
    for sample in samples:
        exact = torch.tensor(transformers_logprobs(model, sample, temperature))
        sample.logprobs = (exact + noise * (2 * torch.rand(exact.shape, generator=generator) - 1)).tolist()
    return samples


def test_the_first_step_at_a_temperature_has_ratio_one(model_dir):
    samples = with_logprobs_of(tiny_qwen3(True), make_samples(12), temperature=0.6)
    batch = pack(samples, [128], 1, 256)
    with one_rank(model_dir, distribution=Distribution(0.6)) as trainer:
        first, second = trainer.update(batch), trainer.update(batch)
    assert first["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["train/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["train/logprob_diff_max"] < 1e-4
    assert first["train/approx_kl"] < 1e-6
    assert first["train/clip_fraction"] == 0
    assert second["train/ratio_max"] > 1.01
    with one_rank(model_dir) as trainer:
        assert trainer.update(batch)["train/logprob_diff_mean"] > 0.1


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_loss_and_statistics_equal_those_computed_token_by_token(model_dir, aggregation):
    model = tiny_qwen3(True)
    samples = with_logprobs_of(model, make_samples(12), noise=0.5)
    algorithm = AlgorithmConfig(aggregation=aggregation, clip_low=0.1, clip_high=0.2)
    with one_rank(model_dir, algorithm) as trainer:
        metrics = trainer.update(pack(samples, [64, 128], 1, 128))
    losses, ratios, differences, clipped = [], [], [], 0
    for sample in samples:
        own = []
        for now, then, mask in zip(
            transformers_logprobs(model, sample), sample.logprobs, sample.loss_mask, strict=True
        ):
            if mask:
                ratio, advantage = math.exp(now - then), sample.advantage
                own.append(-min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage))
                clipped += (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.9)
                ratios.append(ratio)
                differences.append(abs(now - then))
        losses.append(own)
    counted = [own for own in losses if own]
    expected = {
        "token_mean": sum(map(sum, losses)) / sum(map(len, losses)),
        "sample_mean": sum(sum(own) / len(own) for own in counted) / len(counted),
    }
    assert metrics["train/loss"] == pytest.approx(expected[aggregation], abs=1e-5)
    assert metrics["train/loss_tokens"] == len(ratios)
    assert metrics["train/tokens"] == sum(sample.total_tokens for sample in samples)
    assert metrics["train/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(max(ratios), abs=1e-4)
    assert metrics["train/clip_fraction"] == pytest.approx(clipped / len(ratios))
    assert metrics["train/logprob_diff_mean"] == pytest.approx(sum(differences) / len(differences), abs=1e-5)
    assert metrics["train/logprob_diff_max"] == pytest.approx(max(differences), abs=1e-5)
    # The tokens are the old policy's, here the engine's: unbiased is KL(old || new), not the other way round.
    divergence = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)
    assert metrics["train/approx_kl"] == metrics["train/mismatch_k3"] == pytest.approx(divergence, abs=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean"])
def test_the_number_of_microbatches_does_not_change_the_gradient(model_dir, aggregation):
    batch = pack(make_samples(14), [64], 1, 512)
    assert batch.rows == 8
    found = []
    for microbatch_tokens in (512, 64):
        with one_rank(model_dir, AlgorithmConfig(aggregation=aggregation), microbatch_tokens) as trainer:
            trainer.backward(batch)
            found.append(gradients(trainer))
    whole, cut = found
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-5 * float(whole[name].abs().max()))


def test_supervised_loss_and_gradient_are_those_of_transformers(model_dir):
    model, samples = tiny_qwen3(True).train(), make_samples(10)
    batch = pack(samples, [128], 1, 256)
    with one_rank(model_dir, loss="supervised") as trainer:
        trainer.backward(batch)
        grads = gradients(trainer)
    with one_rank(model_dir, loss="supervised") as trainer:
        metrics = trainer.update(batch)
        assert trainer.update(batch)["train/loss"] < metrics["train/loss"]
    loss = supervised_loss(model, samples)
    loss.backward()
    theirs = dict(model.named_parameters())
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in theirs.values()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(grads[name], theirs[name].grad, rtol=1e-4, atol=1e-6)


def test_an_update_that_is_not_finite_changes_nothing(model_dir):
    samples = make_samples(6)
    good = pack(samples, [128], 1, 256)
    samples[2].advantage = math.inf
    samples[2].loss_mask[-1] = 1
    with one_rank(model_dir) as trainer:
        before = trainer.full_tensors()
        skipped = trainer.update(pack(samples, [128], 1, 256))
        after = trainer.full_tensors()
        assert skipped["train/skipped_updates"] == 1
        assert not math.isfinite(skipped["train/grad_norm"])
        assert all(torch.equal(before[name], after[name]) for name in before)
        metrics = trainer.update(good)
        assert metrics["train/skipped_updates"] == 0
        assert math.isfinite(metrics["train/loss"])
        assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.full_tensors().items())


def test_rows_packed_for_other_ranks_are_refused(model_dir):
    batch = pack(make_samples(4), [128], 1)
    batch = batch.select(slice(0, 1))
    with one_rank(model_dir) as trainer:
        trainer.layout = replace(trainer.layout, ranks=2)
        with pytest.raises(RunError, match="another number of ranks"):
            trainer.update(batch)
