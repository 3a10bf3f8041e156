"""trainer.kernels.head=fused: a trainer computes what it computes with the plain head, and refuses what the kernel cannot."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import gradients, make_samples, one_rank, trainer_config

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import AlgorithmConfig, KernelConfig, ParallelConfig
from rl_tpu.devices import CpuDevice
from rl_tpu.errors import UserError
from rl_tpu.trainer.kernels.fused_logprobs import fused_logprobs
from rl_tpu.trainer.packing import pack

FUSED = KernelConfig(head="fused", head_block_tokens=48, head_block_vocabulary=100)


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The numbers that the operator was called with."""
    found: list[tuple] = []

    def spy(hidden, weight, labels, *numbers):
        found.append(numbers)
        return fused_logprobs(hidden, weight, labels, *numbers)

    monkeypatch.setattr("rl_tpu.trainer.head.fused_logprobs", spy)
    return found


def step(model_dir, entropy_coefficient: float, **options) -> tuple:
    """Log-probabilities, metrics and gradients of rows in several micro-batches."""
    batch = pack(make_samples(8), [128], 1, 128)
    algorithm = AlgorithmConfig(entropy_coefficient=entropy_coefficient)
    with one_rank(model_dir, algorithm, distribution=Distribution(0.7), **options) as trainer:
        return trainer.logprobs(batch), trainer.backward(batch), gradients(trainer)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("static_shapes", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_head_changes_no_number(model_dirs, monkeypatch, calls, tied, static_shapes, entropy_coefficient):
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", not static_shapes)
    expected = step(model_dirs[tied], entropy_coefficient)
    assert not calls
    found = step(model_dirs[tied], entropy_coefficient, kernels=FUSED)
    assert set(calls) == {(0.7, 48, 100)}
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, slope in expected[2].items():
        torch.testing.assert_close(found[2][name], slope, rtol=1e-4, atol=1e-5 * float(slope.abs().max()))


def test_in_bfloat16_it_is_closer_to_float32_than_the_plain_head(model_dir, calls):
    exact, _, _ = step(model_dir, 0.0)
    plain, _, _ = step(model_dir, 0.0, param_dtype="bfloat16")
    fused, _, slopes = step(model_dir, 0.0, param_dtype="bfloat16", kernels=FUSED)
    assert calls
    assert (fused - exact).square().sum() < (plain - exact).square().sum()
    assert all(slope.isfinite().all() for slope in slopes.values())


@pytest.mark.parametrize("distribution", [Distribution(top_p=0.9), Distribution(top_k=20)])
def test_a_truncated_distribution_is_refused(model_dir, distribution):
    batch = pack(make_samples(2), [128], 1, 128)
    with (
        one_rank(model_dir, distribution=distribution, kernels=FUSED) as trainer,
        pytest.raises(UserError, match=r"trainer\.kernels\.head: fused .* rollout\.top_p"),
    ):
        trainer.logprobs(batch)


def test_a_divided_vocabulary_is_refused():
    from rl_tpu.trainer.model import head_tiles

    assert head_tiles(trainer_config(kernels=FUSED)) == (48, 100)
    assert head_tiles(trainer_config(parallel=ParallelConfig(tensor=2))) is None
    with pytest.raises(UserError, match=r"trainer\.kernels\.head: fused .* trainer\.parallel\.tensor 2"):
        head_tiles(trainer_config(kernels=FUSED, parallel=ParallelConfig(tensor=2)))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollout.top_p=0.9", "rollout.top_p 0.9"),
        ("rollout.top_k=20", "top_k 20"),
        ("trainer.parallel.tensor=2", "trainer.parallel.tensor 2"),
        ("trainer.kernels.head_block_tokens=100", "trainer.kernels.head_block_tokens 100 is not a multiple of 128"),
    ],
)
def test_settings_that_the_kernel_has_not_are_refused_before_anything_starts(setting, words):
    load_config(["+experiment=quickstart", "trainer.kernels.head=fused"])
    with pytest.raises(UserError, match=words):
        load_config(["+experiment=quickstart", "trainer.kernels.head=fused", setting])
