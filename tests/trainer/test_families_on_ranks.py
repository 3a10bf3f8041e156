"""Two ranks of FSDP2 hold experts and Llama's projections in parts; together they are what one rank holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gradients_program
import pytest
import torch
from family_models import by_saved_name, family_model
from ranks_program import exercise
from safetensors.torch import load_file
from test_ranks import close, equal, run_ranks, without_costs
from tiny_policy import make_samples
from transformers import AutoModelForCausalLM

from rl_tpu.trainer.packing import pack

NAMES = ("qwen3_moe", "qwen3_moe mixed tied", "llama", "llama tied, long context")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What the models are and what one rank (in this process) and two made of them, which also load what the one saved."""
    root = tmp_path_factory.mktemp("family-ranks")
    torch.save(pack(make_samples(14), [64], 2, 2).tensors(), root / "batch.pt")
    arguments = [root / "batch.pt"]
    for name in NAMES:
        directory, one, two = root / name, root / f"{name} on 1", root / f"{name} on 2"
        family_model(name).save_pretrained(directory)
        one.mkdir(parents=True)
        exercise(root / "batch.pt", directory, one)
        shutil.copytree(one / "one", two / "other")
        arguments += [directory, two]
    run_ranks(2, arguments, root)
    return root


@pytest.fixture(params=NAMES)
def runs(request, root) -> tuple[Path, dict, list[dict]]:
    """Directory of the model; what one rank saw; what each of two saw."""
    directory = root / request.param
    one, *two = (torch.load(f"{directory} on {ranks}/rank-{r}.pt") for ranks, r in ((1, 0), (2, 0), (2, 1)))
    return directory, one, two


def test_two_ranks_compute_what_one_does(runs):
    _, one, two = runs
    torch.testing.assert_close(torch.cat([rank["logprobs"] for rank in two]), one["logprobs"], rtol=0, atol=1e-5)
    assert without_costs(two[0]["metrics"]) == without_costs(two[1]["metrics"])
    for step in ("metrics", "second_metrics"):
        assert without_costs(two[0][step]) == pytest.approx(without_costs(one[step]), rel=1e-5, abs=1e-6)
    assert close(two[0]["after_one"], one["after_one"], 1e-5)
    assert not close(one["after_one"], one["loaded"], 1e-4), "the step moved the weights"


def test_what_two_ranks_publish_is_byte_equal_to_what_one_does(runs):
    directory, one, two = runs
    files = load_file(directory / "model.safetensors")
    for result in (one, two[0]):
        assert equal(result["loaded"], files)
        assert equal(result["published"], {name: tensor.bfloat16() for name, tensor in files.items()})


def test_checkpoints_restore_exactly_and_are_read_by_another_number_of_ranks(runs):
    _, one, two = runs
    for result in (one, two[0]):
        assert equal(result["restored"], result["after_one"])
        assert equal(result["after_two_again"], result["after_two"])
    assert equal(two[0]["from_other"], one["after_one"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_exported_directory_is_the_policy(runs, ranks):
    directory, one, two = runs
    after = (one, two[0])[ranks - 1]["after_one"]
    model = AutoModelForCausalLM.from_pretrained(f"{directory} on {ranks}/hf")
    theirs = by_saved_name(model, model.state_dict())
    assert all(torch.equal(after[name], theirs[name]) for name in after)
    assert theirs.keys() - after.keys() <= {"lm_head.weight"}


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
