"""trainer.kernels: a model with kernels computes what it computes without, and settings that cannot be are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import family_model
from tiny_policy import make_samples, one_rank

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import AlgorithmConfig, ExecutionConfig, KernelConfig
from rl_tpu.devices import CpuDevice
from rl_tpu.errors import UserError
from rl_tpu.trainer.packing import pack

OPERATORS = {
    "attention": "rl_tpu.trainer.attention.splash_attention",
    "experts": "rl_tpu.trainer.families.qwen3_moe.grouped_matmul",
}
SPLASH = KernelConfig(attention="splash", attention_block_q=128, attention_block_kv=256)
GROUPED = KernelConfig(experts="grouped", experts_block_rows=128, experts_block_inner=256, experts_block_columns=384)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "llama"])
def family(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("family")
    family_model(request.param).save_pretrained(directory)
    return request.param, directory


@pytest.fixture
def calls(monkeypatch) -> dict[str, list[tuple[Any, ...]]]:
    """What the kernels' operators were called with."""
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in OPERATORS}
    for name, path in OPERATORS.items():
        module, attribute = path.rsplit(".", 1)
        operator = getattr(__import__(module, fromlist=[attribute]), attribute)

        def spy(*arguments, operator=operator, into=found[name]):
            into.append(arguments)
            return operator(*arguments)

        monkeypatch.setattr(path, spy)
    return found


def step(directory, kernels: KernelConfig, **options: Any) -> tuple[torch.Tensor, dict, dict[str, torch.Tensor]]:
    """Log-probabilities, metrics and gradients of rows of several samples and some padding."""
    batch = pack(make_samples(8), [128], 1, 128)
    algorithm = AlgorithmConfig(entropy_coefficient=0.1)
    with one_rank(directory, algorithm, distribution=Distribution(0.7), kernels=kernels, **options) as trainer:
        logprobs, metrics = trainer.logprobs(batch), trainer.backward(batch)
        of = {name: parameter.grad for name, parameter in trainer.policy.model.named_parameters()}
        # Activation checkpointing wraps blocks, and their names.
        of = {name.replace("_checkpoint_wrapped_module.", ""): slope for name, slope in of.items()}
        return logprobs, metrics, trainer.policy.adapter.to_hf(of)


def assert_equal_steps(found: tuple, expected: tuple) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, slope in expected[2].items():
        torch.testing.assert_close(found[2][name], slope, rtol=1e-4, atol=1e-5 * float(slope.abs().max()))


def test_splash_attention_changes_no_number(family, calls, monkeypatch):
    _, directory = family
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", False)
    plain = step(directory, KernelConfig())
    assert not calls["attention"]
    assert_equal_steps(step(directory, SPLASH), plain)
    assert {call[-2:] for call in calls["attention"]} == {(128, 256)}


def test_where_shapes_may_change_attention_goes_by_segments(family, calls):
    step(family[1], SPLASH)
    assert not calls["attention"]


@pytest.mark.parametrize("static", [True, False])
def test_the_grouped_product_changes_no_number(family, calls, monkeypatch, static):
    name, directory = family
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", not static)
    plain = step(directory, KernelConfig())
    assert not calls["experts"]
    assert_equal_steps(step(directory, GROUPED), plain)
    assert {call[-3:] for call in calls["experts"]} == ({(128, 256, 384)} if name == "qwen3_moe" else set())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_hold_the_operators(tmp_path, monkeypatch, checkpointing):
    family_model("qwen3_moe").save_pretrained(tmp_path)
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", False)
    kernels = KernelConfig(attention="splash", experts="grouped")
    options = {"execution": ExecutionConfig(mode="compile"), "activation_checkpointing": checkpointing}
    assert_equal_steps(step(tmp_path, kernels, **options), step(tmp_path, KernelConfig()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["attention=splash", "share_prompts=true"],
            ["trainer.share_prompts true", "trainer.kernels.attention splash"],
        ),
        (["attention=splash", "row_tokens=[200]"], ["trainer.row_tokens [200]", "attention_block_q"]),
        (["attention=splash", "attention_block_kv=200"], ["attention_block_kv 200 is not a multiple of 128"]),
        (["experts=grouped", "experts_block_rows=64"], ["experts_block_rows 64 is not a multiple of 128"]),
    ],
)
def test_settings_that_no_kernel_has_are_refused(settings, words):
    own = ("share_prompts", "row_tokens")
    overrides = [f"trainer.{'' if each.startswith(own) else 'kernels.'}{each}" for each in settings]
    with pytest.raises(UserError) as caught:
        load_config(["+experiment=quickstart", *overrides])
    assert all(word in str(caught.value) for word in words)
    load_config(["+experiment=quickstart", "trainer.row_tokens=[512]", overrides[0]])
