"""Bytes per device against transformers' own models, and bundled config.json against torchtitan's sizes."""

from __future__ import annotations

import json

import pytest
import torch
from compiled import GIB
from transformers import AutoConfig, AutoModelForCausalLM

from rl_tpu.config.compose import load_config, resource
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.preflight.model import find_model, measure

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""Parameters, tied ones once."""


def transformers_model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(find_model(name).directory))


def sharded_numbers(model: torch.nn.Module, shards: int) -> int:
    """Numbers on the first of `shards` devices that divide every tensor by its rows."""
    return sum(-(-len(parameter) // shards) * parameter[0].numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_bundled_configurations_are_the_published_models(name, parameters):
    assert sum(parameter.numel() for parameter in transformers_model(name).parameters()) == parameters
    assert find_model(f"/not/here/{name}").bundled


def test_a_trainer_device_of_four_and_a_rollout_device_of_two():
    config = load_config(["+experiment=qwen3_4b_dapo"])
    sizes = measure(config, find_model("Qwen3-4B").directory)
    model = transformers_model("Qwen3-4B")
    tables = 22528 * 2 * 128 * 4  # cos and sin, float32, the same for all layers
    assert sizes.parameters == PUBLISHED["Qwen3-4B"]
    assert sizes.gradients == 4 * sharded_numbers(model, 4)
    assert sizes.weights == sizes.gradients + tables
    assert sizes.moments == pytest.approx(2 * sizes.gradients, rel=1e-6)
    assert sizes.checkpoint == pytest.approx(12 * sizes.parameters, rel=1e-6)
    assert sizes.reference == 0
    # Two bytes a number; norms, 0.005 % of them, are whole on both devices.
    assert sizes.engine_weights == pytest.approx(sizes.parameters, rel=1e-4)
    assert sizes.engine_weights > sizes.parameters
    assert sizes.engine_policy == 2 * sizes.parameters


def test_key_values_of_a_token_are_what_transformers_keeps_of_one():
    model = transformers_model("Qwen3-0.6B").to(torch.bfloat16)
    cache = model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), use_cache=True).past_key_values
    kept = sum(2 * part.numel() for layer in cache.layers for part in (layer.keys, layer.values))
    config = load_config(["+experiment=qwen3_4b_dapo", "model.path=Qwen3-0.6B"])
    assert measure(config, find_model("Qwen3-0.6B").directory).kv_bytes_per_token == kept / 2


def test_reference_and_muon_are_counted():
    options = [
        "algorithm.kl.coefficient=0.1",
        "trainer.execution.mode=eager",
        "trainer.offload_reference=true",
        "trainer.optimizer.name=muon",
        "++rollout.server_options.kv_cache_dtype=fp8_e5m2",
        "rollout.engines=1",
        "rollout.tensor_parallel=4",
    ]
    config = load_config(["+experiment=qwen3_4b_dapo", "model.path=Qwen3-0.6B", *options])
    sizes = measure(config, find_model("Qwen3-0.6B").directory)
    model = transformers_model("Qwen3-0.6B")
    tables = sizes.weights - sizes.gradients
    assert sizes.reference == 2 * sharded_numbers(model, 4) + tables
    assert sizes.reference_on_host
    in_blocks = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1)
    assert sizes.moments == pytest.approx(in_blocks + 2 * (PUBLISHED["Qwen3-0.6B"] - in_blocks), rel=1e-3)
    assert sizes.kv_bytes_per_token == 2 * 28 * 8 * 128 / 4  # eight heads of one byte a number, on four devices


@pytest.mark.slow
def test_experts_divide_among_the_devices():
    config = load_config(["+experiment=qwen3_4b_dapo", "model.path=Qwen3-30B-A3B"])
    sizes = measure(config, find_model("Qwen3-30B-A3B").directory)
    assert sizes.parameters == PUBLISHED["Qwen3-30B-A3B"]
    assert sizes.gradients == pytest.approx(sizes.parameters, rel=1e-4)  # four bytes a number, a quarter of them
    assert sizes.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2 / 2
    assert sizes.weights + sizes.gradients + sizes.moments > 94 * GIB


def test_the_models_own_config_json_comes_first(tmp_path):
    config = json.loads((resource("models_config") / "Qwen3-4B" / "config.json").read_text())
    (tmp_path / "Qwen3-4B").mkdir()
    (tmp_path / "Qwen3-4B" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    found = find_model(str(tmp_path / "Qwen3-4B"))
    assert not found.bundled
    assert found.directory == tmp_path / "Qwen3-4B"


def test_a_model_that_nobody_knows_is_one_line():
    with pytest.raises(UserError, match=r"no config\.json.*Qwen3-0\.6B, Qwen3-30B-A3B, Qwen3-4B, Qwen3-8B"):
        find_model("/not/here/Gemma")
    with pytest.raises(UserError, match=r"python examples/quickstart/warmup\.py --out /not/here/tiny"):
        find_model("/not/here/tiny", "examples/quickstart/warmup.py")
