"""Taking over a version inside the engine, with faults that a live engine cannot be brought to. (Others: test_engine.)"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rl_tpu.rollout import coverage, weight_loader
from weight_sync import Shard, open_sender


@pytest.fixture
def one_rank(monkeypatch):
    """SGLang's answer to how many ranks there are, and a model that takes anything."""
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_size=1)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    monkeypatch.setattr(coverage, "check_coverage", lambda model, manifest: None)
    monkeypatch.setattr(coverage, "check_tied", lambda model, tensors: None)


@pytest.fixture
def sender(run_id):
    sender = open_sender("shared_memory", run_id=run_id, slots=1)
    yield sender
    sender.close()


def named_tensors(handle) -> list[tuple[str, torch.Tensor]]:
    """The request as SGLang unpacks it."""
    return pickle.loads(base64.b64decode(weight_loader.encode_request(handle, "shared_memory", True)))


def weights(value: float) -> list[Shard]:
    return [Shard.whole("a", torch.full((10,), value)), Shard.whole("b", torch.full((3, 3), value))]


def test_a_version_that_is_overwritten_while_it_is_loaded_is_not_served(one_rank, sender):
    handle = sender.publish(1, weights(1.0))

    def load_weights(tensors):
        next(tensors)
        sender.publish(2, weights(2.0))  # the trainer did not wait
        list(tensors)

    with pytest.raises(
        weight_loader.WeightLoadError, match=r"version 1 is no longer in .*its weights are a mixture now"
    ):
        weight_loader.load(SimpleNamespace(load_weights=load_weights), named_tensors(handle))


def test_a_model_that_cannot_load_is_a_refusal(one_rank, sender):
    handle = sender.publish(1, weights(1.0))

    def load_weights(tensors):
        raise KeyError("a")

    with pytest.raises(weight_loader.WeightLoadError, match=r"'a' \(KeyError; its weights are a mixture now\)"):
        weight_loader.load(SimpleNamespace(load_weights=load_weights), named_tensors(handle))


def test_the_report_travels_in_the_answer(one_rank, sender):
    loaded = {}
    model = SimpleNamespace(load_weights=lambda tensors: loaded.update((name, t.clone()) for name, t in tensors))

    def update_weights_from_tensor(named_tensors, load_format):
        weight_loader.load(model, named_tensors)
        return True, "Success"

    handle = sender.publish(1, weights(1.0))
    success, message = weight_loader._answer(
        update_weights_from_tensor, named_tensors=named_tensors(handle), load_format=weight_loader.LOADER
    )
    assert success
    report = json.loads(message)
    assert (report["tensors"], report["bytes"]) == (2, 4 * 19)
    assert loaded["a"].tolist() == [1.0] * 10

    handle["sequence"] += 1
    success, message = weight_loader._answer(
        update_weights_from_tensor, named_tensors=named_tensors(handle), load_format=weight_loader.LOADER
    )
    assert not success
    assert "StaleHandleError; nothing was loaded" in message


def test_errors_of_other_loaders_are_not_swallowed():
    def update_weights_from_tensor(named_tensors, load_format):
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        weight_loader._answer(update_weights_from_tensor, named_tensors=[], load_format=None)
