"""One rank and two ranks of FSDP2 do the same with every family, save and load exactly, and read each other's
checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gradients_program
import pytest
import ranks_program
import torch
from family_models import by_saved_name, family_model
from ranks import close, equal, run_ranks
from safetensors.torch import load_file
from tiny_policy import make_samples
from transformers import AutoModelForCausalLM

from rl_tpu.trainer.export import stored_dtypes
from rl_tpu.trainer.packing import pack

COSTS = ("train/tokens_per_s", "train/peak_memory_gb")
NAMES = ("qwen3", "qwen3 tied", "qwen3_moe", "qwen3_moe mixed tied", "llama", "llama tied, long context")
Runs = tuple[Path, dict, list[dict]]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What the models are and what one rank (in this process) and two made of them, which also load what the one saved."""
    root = tmp_path_factory.mktemp("ranks")
    torch.save(pack(make_samples(14), [64], 2, 128).tensors(), root / "batch.pt")
    arguments = [root / "batch.pt"]
    for name in NAMES:
        directory, one, two = root / name, root / f"{name} on 1", root / f"{name} on 2"
        family_model(name).save_pretrained(directory)
        one.mkdir(parents=True)
        ranks_program.exercise(root / "batch.pt", directory, one)
        shutil.copytree(one / "one", two / "other")
        arguments += [directory, two]
    run_ranks(2, arguments, root, Path(ranks_program.__file__))
    return root


@pytest.fixture(params=NAMES)
def runs(request, root) -> Runs:
    """Directory of the model; what one rank saw; what each of two saw."""
    directory = root / request.param
    one, *two = (torch.load(f"{directory} on {ranks}/rank-{r}.pt") for ranks, r in ((1, 0), (2, 0), (2, 1)))
    return directory, one, two


def rank_zero(runs: Runs, ranks: int) -> dict:
    _, one, two = runs
    return one if ranks == 1 else two[0]


def without_costs(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in COSTS}


def test_weights_are_read_exactly(runs):
    directory, one, two = runs
    files = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in files) is not ("tied" in directory.name)
    assert equal(one["loaded"], files)
    assert equal(two[0]["loaded"], files)
    assert two[1]["loaded"] == {}


def test_two_ranks_compute_what_one_does(runs):
    _, one, two = runs
    torch.testing.assert_close(torch.cat([rank["logprobs"] for rank in two]), one["logprobs"], rtol=0, atol=1e-5)
    assert without_costs(two[0]["metrics"]) == without_costs(two[1]["metrics"])
    for step in ("metrics", "second_metrics"):
        assert without_costs(two[0][step]) == pytest.approx(without_costs(one[step]), rel=1e-5, abs=1e-6)
    assert close(two[0]["after_one"], one["after_one"], 1e-5)
    assert not close(one["after_one"], one["loaded"], 1e-4), "the step moved the weights"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_restores_model_optimizer_schedule_and_random_state_exactly(runs, ranks):
    result = rank_zero(runs, ranks)
    assert equal(result["restored"], result["after_one"])
    assert without_costs(result["metrics_again"]) == without_costs(result["second_metrics"])
    assert equal(result["after_two_again"], result["after_two"])
    assert result["random_state_restored"]
    assert not equal(result["after_two"], result["after_one"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_from_before_the_first_step_is_exact_too(runs, ranks):
    result = rank_zero(runs, ranks)
    assert without_costs(result["metrics_from_start"]) == without_costs(result["metrics"])
    assert equal(result["after_one_again"], result["after_one"])


def test_two_ranks_continue_from_one_ranks_checkpoint(runs):
    _, one, (two, _) = runs
    assert equal(two["from_other"], one["after_one"])
    assert two["from_other_metrics"]["train/grad_norm"] == pytest.approx(
        one["second_metrics"]["train/grad_norm"], rel=1e-5
    )


def test_what_two_ranks_publish_is_byte_equal_to_what_one_does_and_to_the_files(runs):
    directory, one, two = runs
    files = load_file(directory / "model.safetensors")
    for result in (one, two[0]):
        assert equal(result["published"], {name: tensor.bfloat16() for name, tensor in files.items()})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_exported_directory_is_the_policy(runs, ranks):
    exported = Path(f"{runs[0]} on {ranks}", "hf")
    model = AutoModelForCausalLM.from_pretrained(exported)
    after = rank_zero(runs, ranks)["after_one"]
    theirs = by_saved_name(model, model.state_dict())
    assert all(torch.equal(after[name], theirs[name]) for name in after)
    assert theirs.keys() - after.keys() <= {"lm_head.weight"}
    assert set(stored_dtypes(exported).values()) == {torch.float32}
    assert not list(exported.parent.glob(".hf*"))


def test_ranks_that_hold_copies_of_the_experts_find_the_same_gradient(tmp_path):
    """HSDP of two replicas, and SimpleFSDP; gradients come by Hugging Face's names, so weights and names are tested too."""
    directory = tmp_path / "model"
    family_model("qwen3_moe mixed tied").save_pretrained(directory)
    layouts = [{"cuts": [2], "parallel": {"replicas": 2}}, {"cuts": [2], "parallel": {"sharding": "simple_fsdp"}}]
    run_ranks(
        2, [directory, tmp_path / "found.pt", *map(json.dumps, layouts)], tmp_path, Path(gradients_program.__file__)
    )
    found = torch.load(tmp_path / "found.pt")
    one = gradients_program.exercise(directory, {"cuts": [2]})
    for layout in layouts:
        two = found[json.dumps(layout)]
        for laying, (gradient, _) in one.items():
            assert close(two[laying][0], gradient, 1e-5)
