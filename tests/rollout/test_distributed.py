"""A policy broadcast to real engines through SGLang's own endpoints."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from remote_processes import on_all, start_ranks
from tiny import changed, load_model, make_config, weights_of

from rl_tpu.errors import RunError
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.delivery import Broadcast
from rl_tpu.rollout.distributed import BroadcastUpdates
from rl_tpu.rollout.engine import EngineLostError, UpdateRefusedError, WeightUpdate
from rl_tpu.rollout.sglang import SGLangEngine

sys.path.append(str(Path(__file__).parents[1] / "weight_sync"))
import ici_processes as ici

TIMEOUT_S = 60.0


def publish(ranks, version: int, weights: dict, how: str = "rows") -> dict:
    return on_all(ranks, ici.publish_tensors, version, weights, how)[0]


def broadcast(tensor_parallel: int = 1) -> Broadcast:
    return Broadcast(BroadcastUpdates(tensor_parallel, TIMEOUT_S))


async def update(engines: list[SGLangEngine], delivery: Broadcast, handle: dict) -> dict[str, RunError | None]:
    """By engine: why it does not hold the version."""
    coming = delivery.deliver(engines, handle, handle["version"])
    outcomes = await asyncio.gather(*coming, return_exceptions=True)
    errors = [None if isinstance(outcome, WeightUpdate) else outcome for outcome in outcomes]
    assert all(error is None or isinstance(error, UpdateRefusedError | EngineLostError) for error in errors), errors
    return {engine.name: error for engine, error in zip(engines, errors, strict=True)}


def wrong(run, engine: SGLangEngine, weights: dict, tensor_parallel: int = 1) -> list[str]:
    return differing(expected_checksums(weights, tensor_parallel), run(engine.weight_checksums()))


@pytest.fixture
def senders(tmp_path, run_id):
    """Opens senders on so many ranks."""
    remotes = []

    def open_on(world_size: int, **options):
        ranks = start_ranks(world_size, tmp_path / f"store-{len(remotes)}")
        remotes.extend(ranks)
        on_all(ranks, ici.open_ici, run_id, {"timeout_s": 20, **options})
        return ranks

    yield open_on
    for remote in remotes:
        remote.kill()


def test_versions_through_broadcast(engine, senders, run, model_dirs):
    weights = weights_of(load_model(model_dirs["untied"]))
    delivery = broadcast()
    for world_size, options in (
        (1, {}),
        (2, {"bucket_tensors": 3}),
        (2, {"bucket_tensors": 1000}),
        (1, {"hashes": False}),
    ):
        ranks = senders(world_size, **options)
        for version in (1, 2):
            weights = changed(weights, seed=10 * world_size + version)
            handle = publish(ranks, version, weights)
            assert run(update([engine], delivery, handle)) == {engine.name: None}
            assert wrong(run, engine, weights) == []


def test_a_damaged_bucket_is_refused_with_the_tensors_name(engine, senders, run, model_dirs):
    weights = weights_of(load_model(model_dirs["untied"]))
    delivery, ranks = broadcast(), senders(1, bucket_tensors=4)
    assert run(update([engine], delivery, publish(ranks, 1, weights))) == {engine.name: None}
    newer = changed(weights, seed=1)
    handle = publish(ranks, 2, newer)
    ranks[0].call(ici.flip_a_byte, 2)
    said = run(update([engine], delivery, handle))[engine.name]
    assert isinstance(said, UpdateRefusedError)
    said = str(said)
    assert "version 2: xxh3-128 of 1 tensor(s) differs" in said
    assert any(name in said for name in weights)
    assert "nothing was loaded" in said
    assert wrong(run, engine, weights) == []
    assert run(update([engine], delivery, handle)) == {engine.name: None}
    assert wrong(run, engine, newer) == []


def test_tensors_that_do_not_fit_are_refused_by_name(engine, senders, run, model_dirs):
    weights = weights_of(load_model(model_dirs["untied"]))
    delivery, ranks = broadcast(), senders(1)
    assert run(update([engine], delivery, publish(ranks, 1, weights))) == {engine.name: None}
    strange = {**changed(weights, 3), "model.layers.0.strange.weight": weights["model.norm.weight"]}
    said = run(update([engine], delivery, publish(ranks, 2, strange)))[engine.name]
    assert isinstance(said, UpdateRefusedError)
    assert "model.layers.0.strange.weight" in str(said)
    assert wrong(run, engine, weights) == []


@pytest.mark.parametrize("hashes", [True, False])
def test_a_sender_that_dies_in_mid_broadcast(engine, senders, run, model_dirs, hashes):
    """Buckets that can be verified are kept until all are there; others are loaded one by one."""
    weights = weights_of(load_model(model_dirs["untied"]))
    delivery, ranks = broadcast(), senders(1, bucket_tensors=4, hashes=hashes)
    assert run(update([engine], delivery, publish(ranks, 1, weights))) == {engine.name: None}
    newer = changed(weights, seed=2)
    handle = publish(ranks, 2, newer)
    ranks[0].call(ici.die_sending, 2)
    said = run(update([engine], delivery, handle))[engine.name]
    assert isinstance(said, UpdateRefusedError if hashes else EngineLostError)
    assert ("nothing was loaded" if hashes else "its weights are a mixture now") in str(said)
    assert (wrong(run, engine, weights) == []) == hashes
    said = run(update([engine], delivery, handle))[engine.name]
    assert isinstance(said, UpdateRefusedError)
    assert "the trainer does not send policy version 2" in str(said)
    assert run(update([engine], delivery, publish(senders(1), 3, newer))) == {engine.name: None}
    assert wrong(run, engine, newer) == []


def test_an_engine_of_two_ranks(local_ray, senders, run, model_dirs, tmp_path):
    model_dir = model_dirs["untied"]
    config = make_config(model_dir, rollout={"tensor_parallel": 2})
    engine = run(SGLangEngine.start(config, model_dir, tmp_path, 0, {"num_cpus": 0}))
    try:
        weights = weights_of(load_model(model_dir))
        delivery, ranks = broadcast(2), senders(2, bucket_tensors=5)
        for version, how in enumerate(("rows", "columns")):
            weights = changed(weights, seed=version)
            assert run(update([engine], delivery, publish(ranks, version, weights, how))) == {engine.name: None}
            assert wrong(run, engine, weights, 2) == []
    finally:
        run(engine.close())
