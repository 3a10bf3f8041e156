"""The reference policy: what the policy was, in its own copy, wherever that lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_policy import make_samples, trainer_config

from rl_tpu.config.schema import AlgorithmConfig, KLConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer

ALGORITHM = AlgorithmConfig(kl=KLConfig(coefficient=0.1))
BATCH = pack(make_samples(8), [64], 1, 128)


@pytest.fixture(params=["float32", "bfloat16"])
def param_dtype(request) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["on the device", "offloaded"])
def trainer(request, param_dtype, model_dir: Path):
    config = trainer_config(param_dtype=param_dtype, offload_reference=request.param)
    trainer = PolicyTrainer(config, ALGORITHM, model_dir)
    yield trainer
    trainer.close()


def update(trainer: PolicyTrainer) -> torch.Tensor:
    """Learn once from the batch, under the reference's log-probabilities; those of the policy afterwards."""
    reference = trainer.logprobs(BATCH, reference=True)
    rows = type(BATCH)(**BATCH.tensors() | {"reference_logprobs": reference})
    trainer.update(rows)
    return trainer.logprobs(BATCH)


def test_it_stays_what_the_policy_was_until_it_is_refreshed(trainer, param_dtype):
    before = trainer.logprobs(BATCH)
    assert torch.equal(trainer.logprobs(BATCH, reference=True), before)
    after = update(trainer)
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(trainer.logprobs(BATCH, reference=True), before)
    trainer.refresh_reference()
    assert torch.equal(trainer.logprobs(BATCH, reference=True), after)
    assert not torch.equal(update(trainer), after)
    assert torch.equal(trainer.logprobs(BATCH, reference=True), after)


def test_it_has_no_gradients_and_weights_in_the_type_it_computes_in(trainer, param_dtype):
    update(trainer)
    parameters = list(trainer.reference._policy.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {getattr(torch, param_dtype)}
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
    assert {parameter.dtype for parameter in trainer.policy.model.parameters()} == {torch.float32}


def test_a_checkpoint_holds_it_once_it_was_refreshed(trainer, tmp_path):
    first = trainer.logprobs(BATCH, reference=True)
    trainer.save(tmp_path / "first")
    update(trainer)
    trainer.refresh_reference()
    second = trainer.logprobs(BATCH, reference=True)
    update(trainer)
    trainer.save(tmp_path / "second")
    update(trainer)
    trainer.refresh_reference()
    assert not torch.equal(trainer.logprobs(BATCH, reference=True), second)
    trainer.saved()
    trainer.load(tmp_path / "second")
    assert torch.equal(trainer.logprobs(BATCH, reference=True), second)
    assert not torch.equal(first, second)
