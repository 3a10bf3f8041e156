"""The gradient of a batch does not depend on how it is cut: into rows, micro-batches, ranks or parts of matrices.

All of them are compared with one rank that sees one sample to a row in one micro-batch, and with float64 autograd of
transformers, one sample at a time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gradients_program import ALGORITHM, CUTS, LAYINGS, exercise, uneven_samples
from ranks import run_ranks
from tiny_policy import response_logprobs, tiny_qwen3
from transformers import Qwen3ForCausalLM

from rl_tpu.types import Sample

PROGRAM = Path(__file__).with_name("gradients_program.py")
ON_TWO = {
    "FSDP2": {},
    "tensor": {"parallel": {"tensor": 2}},
    "HSDP": {"parallel": {"replicas": 2}},
    "SimpleFSDP": {"parallel": {"sharding": "simple_fsdp"}},
}
ON_FOUR = {
    "HSDP": {"parallel": {"replicas": 2}},
    "tensor, FSDP2": {"parallel": {"tensor": 2}},
    "tensor, HSDP": {"parallel": {"tensor": 2, "replicas": 2}},
    "tensor, SimpleFSDP": {"parallel": {"tensor": 2, "sharding": "simple_fsdp"}},
    "HSDP by SimpleFSDP": {"parallel": {"replicas": 2, "sharding": "simple_fsdp"}},
}
BFLOAT16 = {"param_dtype": "bfloat16"}
Gradient = dict[str, torch.Tensor]


def worst(ours: Gradient, theirs: Gradient) -> float:
    """Largest distance between two gradients of a parameter, relative to the second's norm."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


def transformers_gradient(model: Qwen3ForCausalLM, samples: list[Sample], weight: float) -> Gradient:
    """Of `weight` times the sum of PPO's clipped losses of all tokens that the policy wrote."""
    model.zero_grad()
    for sample in samples:
        ratio = (response_logprobs(model, sample) - torch.tensor(sample.logprobs, dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        gain = torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
        (-(gain * torch.tensor(sample.loss_mask)).sum() * weight).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def written(samples: list[Sample]) -> int:
    return sum(sum(sample.loss_mask) for sample in samples)


@pytest.fixture(scope="module")
def second_source(model_dirs) -> Gradient:
    model = Qwen3ForCausalLM.from_pretrained(model_dirs[False], attn_implementation="eager").double()
    samples = uneven_samples()
    return transformers_gradient(model, samples, 1 / written(samples))


@pytest.fixture(scope="module")
def on_one(model_dirs) -> dict[tuple[str, int], tuple[Gradient, dict[str, float]]]:
    return exercise(model_dirs[False], {})


@pytest.fixture(scope="module")
def on_two(model_dirs, tmp_path_factory) -> dict:
    return run(2, model_dirs[False], tmp_path_factory.mktemp("two"), [*ON_TWO.values(), BFLOAT16 | {"cuts": [1]}])


def run(ranks: int, model_dir: Path, out: Path, settings: list[dict]) -> dict:
    """What the ranks found, by the JSON of their settings."""
    run_ranks(ranks, [model_dir, out / "gradients.pt", *map(json.dumps, settings)], out, PROGRAM)
    return torch.load(out / "gradients.pt")


def agree(results: dict, on_one: dict, second_source: Gradient) -> None:
    expected, metrics = on_one["unpacked", 1]
    for case, (found, update) in results.items():
        assert worst(found, expected) < 1e-5, case
        assert worst(found, second_source) < 1e-5, case
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "loss_tokens"):
            assert update[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"], rel=1e-5), (case, name)


def test_the_check_can_fail(second_source, model_dirs):
    """Means per rank, averaged over two ranks that hold different numbers of tokens, are another gradient."""
    samples = uneven_samples()
    halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    model = Qwen3ForCausalLM.from_pretrained(model_dirs[False], attn_implementation="eager").double()
    parts = [transformers_gradient(model, half, 1 / written(half) / 2) for half in halves]
    mean_of_means = {name: parts[0][name] + parts[1][name] for name in second_source}
    assert worst(mean_of_means, second_source) > 1e-2


def test_one_rank_finds_the_same_in_any_rows_and_any_number_of_microbatches(on_one, second_source):
    assert on_one.keys() == {(laying, cut) for laying in LAYINGS for cut in CUTS}
    assert 0.1 < on_one["unpacked", 1][1]["train/clip_fraction"] < 0.9, "ratios are on both sides of the clip"
    agree(on_one, on_one, second_source)


@pytest.mark.parametrize("layout", ON_TWO)
def test_two_ranks_find_what_one_does(layout, on_two, on_one, second_source):
    results = on_two[json.dumps(ON_TWO[layout])]
    assert results.keys() == on_one.keys()
    agree(results, on_one, second_source)


@pytest.mark.slow
def test_four_ranks_find_what_one_does(on_one, second_source, tmp_path):
    tiny_qwen3(False, vocabulary=260).save_pretrained(tmp_path / "model")
    expected = exercise(tmp_path / "model", {"cuts": [1]})
    found = run(4, tmp_path / "model", tmp_path, [settings | {"cuts": [1, 2]} for settings in ON_FOUR.values()])
    for results in found.values():
        agree(results, expected, expected["unpacked", 1][0])


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_computing_again_in_the_backward_changes_nothing(checkpointing, model_dirs, on_one, second_source):
    agree(exercise(model_dirs[False], {"activation_checkpointing": checkpointing, "cuts": [2]}), on_one, second_source)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_blocks_find_the_same(checkpointing, model_dirs, on_one, second_source):
    settings = {"execution": {"mode": "compile"}, "activation_checkpointing": checkpointing}
    agree(exercise(model_dirs[False], settings), on_one, second_source)


@pytest.mark.slow
def test_compiled_blocks_find_the_same_on_two_ranks(model_dirs, on_one, second_source, tmp_path):
    settings = [settings | {"execution": {"mode": "compile"}, "cuts": [2]} for settings in ON_TWO.values()]
    for results in run(2, model_dirs[False], tmp_path, settings).values():
        agree(results, on_one, second_source)


def test_gradients_in_bfloat16_are_added_in_float32(model_dirs, on_two):
    """Each of two ranks has half the rows; one rank has the same halves one after the other."""
    one, _ = exercise(model_dirs[False], BFLOAT16 | {"cuts": [2]})["unpacked", 2]
    two, _ = on_two[json.dumps(BFLOAT16 | {"cuts": [1]})]["unpacked", 1]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(part, part.bfloat16().float()) for part in one.values())
