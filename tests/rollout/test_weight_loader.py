"""Taking over a version inside the engine, with faults that a live engine cannot be brought to. (Others: test_engine.)"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
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


def weights(value: float) -> list[Shard]:
    return [Shard.whole("a", torch.full((10,), value)), Shard.whole("b", torch.full((3, 3), value))]


def stage(handle) -> None:
    """Stage version 1 and wait for it."""
    action = weight_loader.stage_action(handle, 1, "shared_memory", verify=True)
    weight_loader._stage.begin(None, json.loads(action.removeprefix(weight_loader.ACTION)))
    deadline = time.monotonic() + 30
    while not weight_loader._stage.done(1):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def load(model, version=1) -> None:
    """The load request as SGLang unpacks it."""
    weight_loader.load(model, pickle.loads(base64.b64decode(weight_loader.load_payload(version))))


def test_a_staged_version_is_loaded_once(one_rank, sender):
    loaded = {}
    model = SimpleNamespace(load_weights=lambda tensors: loaded.update((name, t.clone()) for name, t in tensors))
    stage(sender.publish(1, weights(1.0)))
    report = weight_loader._staged(1)
    assert (report["staged"], report["tensors"], report["bytes"]) == (True, 2, 4 * 19)
    assert loaded == {}
    load(model)
    assert loaded["a"].tolist() == [1.0] * 10
    with pytest.raises(weight_loader.WeightLoadError, match=r"version 1 is not staged .*nothing was loaded"):
        load(model)


def test_another_version_than_the_staged_one_is_not_loaded(one_rank, sender):
    stage(sender.publish(1, weights(1.0)))
    with pytest.raises(weight_loader.WeightLoadError, match=r"version 2 is not staged .*nothing was loaded"):
        load(SimpleNamespace(load_weights=pytest.fail), version=2)


def test_a_version_that_is_overwritten_while_it_waits_is_not_loaded(one_rank, sender):
    stage(sender.publish(1, weights(1.0)))
    sender.publish(2, weights(2.0))  # the trainer did not wait
    with pytest.raises(weight_loader.WeightLoadError, match=r"version 1 is no longer in .*nothing was loaded"):
        load(SimpleNamespace(load_weights=pytest.fail))


def test_a_version_that_is_overwritten_while_it_is_loaded_is_not_served(one_rank, sender):
    stage(sender.publish(1, weights(1.0)))

    def load_weights(tensors):
        next(tensors)
        sender.publish(2, weights(2.0))
        list(tensors)

    with pytest.raises(
        weight_loader.WeightLoadError, match=r"version 1 is no longer in .*its weights are a mixture now"
    ):
        load(SimpleNamespace(load_weights=load_weights))


def test_a_model_that_cannot_load_is_a_mixture(one_rank, sender):
    stage(sender.publish(1, weights(1.0)))

    def load_weights(tensors):
        raise KeyError("a")

    with pytest.raises(weight_loader.WeightLoadError, match=r"'a' \(KeyError; its weights are a mixture now\)"):
        load(SimpleNamespace(load_weights=load_weights))


def test_errors_of_other_loaders_are_not_swallowed():
    def update_weights_from_tensor(manager, request):
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        weight_loader._update_weights(update_weights_from_tensor, None, SimpleNamespace(load_format=None))
