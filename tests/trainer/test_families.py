"""Every family against transformers: log-probabilities, gradients, names and shapes, what is written."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_models import MODELS, by_saved_name, family_model
from safetensors.torch import load_file
from tiny_policy import make_samples, one_rank, predictions, supervised_loss, transformers_logprobs
from transformers import AutoModelForCausalLM

from rl_tpu.trainer.packing import pack
from rl_tpu.types import PackedBatch, Sample


@pytest.fixture(scope="module", params=MODELS)
def family(request, tmp_path_factory) -> SimpleNamespace:
    """A model of transformers and the directory where it lies."""
    model = family_model(request.param)
    directory = tmp_path_factory.mktemp("family")
    model.save_pretrained(directory)
    return SimpleNamespace(model=model, directory=directory, files=load_file(directory / "model.safetensors"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(12)


@pytest.fixture(scope="module")
def batch(samples) -> PackedBatch:
    """Rows with several samples each."""
    return pack(samples, [128])


def differences(model, samples: list[Sample], batch: PackedBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Distance from transformers' log-probability, of every response token."""
    found = []
    for index, sample in enumerate(samples):
        ours = logprobs[predictions(batch, index, sample)]
        found.append((ours - torch.tensor(transformers_logprobs(model, sample))).abs())
    return torch.cat(found)


def test_packed_logprobs_are_those_of_transformers(family, samples, batch):
    with one_rank(family.directory) as trainer:
        logprobs = trainer.logprobs(batch)
    assert differences(family.model, samples, batch, logprobs).max() < 1e-5


def test_in_bfloat16_the_trainer_is_no_farther_from_float32_than_transformers(family):
    """The usual token: where rounding makes one of experts' scores overtake another, either is off by much, by chance."""
    samples = make_samples(40, seed=1)
    batch = pack(samples, [128])
    with one_rank(family.directory, param_dtype="bfloat16") as trainer:
        ours = differences(family.model, samples, batch, trainer.logprobs(batch)).median()
    rounded = AutoModelForCausalLM.from_pretrained(family.directory, dtype=torch.bfloat16).eval()
    theirs = [torch.tensor(transformers_logprobs(model, s)) for model in (rounded, family.model) for s in samples]
    gap = (torch.cat(theirs[: len(samples)]) - torch.cat(theirs[len(samples) :])).abs().median()
    assert 1e-4 < ours <= gap, "computed in bfloat16, as exactly as transformers"


def test_gradients_are_those_of_transformers(family, samples, batch):
    ours, norm = gradients(family.directory, batch)
    model = family.model
    model.zero_grad()
    supervised_loss(model, samples).backward()
    parameters = dict(model.named_parameters())
    theirs = by_saved_name(model, {name: parameter.grad for name, parameter in parameters.items()})
    assert norm == pytest.approx(math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values())), rel=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name],
            gradient,
            rtol=0,
            atol=1e-5 * float(gradient.abs().max()) + 1e-8,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def gradients(directory: Path, batch: PackedBatch) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of the supervised loss by Hugging Face's names, and its norm as a real step reports it."""
    found = {}
    with one_rank(directory, loss="supervised") as trainer:
        step = trainer.optimizer.step

        def keep_then_step(*arguments):
            grads = {name: parameter.grad.clone() for name, parameter in trainer.policy.model.named_parameters()}
            found.update(trainer.policy.adapter.to_hf(grads))
            return step(*arguments)

        trainer.optimizer.step = keep_then_step
        norm = trainer.update(batch)["train/grad_norm"]
    return found, norm


def test_names_and_weights_are_those_of_the_files(family, tmp_path):
    """Also after a step, as transformers reads the directory."""
    with one_rank(family.directory) as trainer:
        tensors = trainer.full_tensors()
        assert tensors.keys() == family.files.keys()
        assert all(torch.equal(tensors[name], family.files[name]) for name in tensors)
        trainer.update(pack(make_samples(6), [128]))
        after = trainer.full_tensors()
        trainer.export_hf(tmp_path / "hf")
    moved = [name for name in after if not torch.equal(after[name], tensors[name])]
    assert len(moved) > 0.8 * len(after)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    read = by_saved_name(model, model.state_dict())
    assert all(torch.equal(read[name], after[name]) for name in after)
    assert read.keys() - after.keys() <= {"lm_head.weight"}


def test_what_engines_get_are_views_of_the_live_parameters(family):
    with one_rank(family.directory) as trainer:
        storages = {p.untyped_storage().data_ptr() for p in trainer.policy.model.parameters()}
        shards = list(trainer.shards(torch.float32))
    assert {shard.name for shard in shards} == family.files.keys()
    assert all(shard.data.untyped_storage().data_ptr() in storages for shard in shards)
