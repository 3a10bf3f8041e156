"""A fleet of one engine that fails to take a policy: nothing wrong is served, nothing is lost, it comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
from processes import gone, session_members
from tiny import changed, load_model, make_config, weights_of

from rl_tpu.rollout.engine import EngineLostError
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.types import SamplingParams
from weight_sync.shared_memory.segments import PAGE_BYTES

PROMPT = [9, 30, 31, 32, 33, 50]


@pytest.fixture(scope="module")
def fleet(model_dirs, local_ray, run, tmp_path_factory):
    model_dir = model_dirs["untied"]
    config = make_config(model_dir, weight_sync={"transport": "faulty_transport:TRANSPORT"})
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}}
    fleet = run(Fleet.start(config, model_dir, tmp_path_factory.mktemp("run"), [options]))
    yield fleet
    run(fleet.close())


@pytest.fixture
def weights(model_dirs):
    return weights_of(load_model(model_dirs["untied"]))


async def synchronise(fleet, version, handle, publish_whole):
    """What the loop does, with requests in flight; metrics and the requests' completions."""
    requests = [asyncio.create_task(fleet.generate([*PROMPT, i], SamplingParams(400), 2)) for i in range(3)]
    await asyncio.sleep(0.5)
    async with fleet.syncing():
        metrics = await fleet.update_weights(handle, version)
        if fleet.behind:
            metrics |= await fleet.reload(publish_whole(), version)
    answers = await asyncio.wait_for(asyncio.gather(*requests), 300)
    return metrics, [completion for answer in answers for completion in answer]


def test_a_policy_that_does_not_verify(fleet, run, publish, weights):
    """The engine serves what it held; sent again, it takes the policy."""
    run(fleet.update_weights(publish(1, weights), 1))
    new = changed(weights, seed=2)
    handle = publish(2, new)
    np.memmap(handle["path"], dtype=np.uint8, mode="r+")[PAGE_BYTES + 1000] ^= 1
    metrics, completions = run(synchronise(fleet, 2, handle, lambda: publish(2, new)))
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (1, 1)
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
    assert all(completion.spans[0].version == 1 for completion in completions)
    assert run(fleet.check_weights(new)) == 1
    assert fleet.lost == {}


@pytest.mark.parametrize("late", [False, True])
def test_a_load_that_breaks_off(fleet, run, publish, weights, tmp_path, monkeypatch, late):
    """What was in flight is written again from the start, under the new policy: no token comes from a mixture. If the
    requests learn of it ``late``, the engine is whole again, and stays in routing."""
    run(fleet.update_weights(publish(2, weights), 2))
    new = changed(weights, seed=3)
    (tmp_path / "fault").touch()
    engine, reloaded = fleet.engines[0], asyncio.Event()

    async def write(drafts, write=engine.write):
        try:
            await write(drafts)
        except EngineLostError:
            await reloaded.wait()
            raise

    async def reload(handle, version, reload=fleet.reload):
        metrics = await reload(handle, version)
        reloaded.set()
        return metrics

    if late:
        monkeypatch.setattr(engine, "write", write)
        monkeypatch.setattr(fleet, "reload", reload)
    handle = publish(3, new) | {"fault": {"kind": "raise", "file": str(tmp_path / "fault")}}
    metrics, completions = run(synchronise(fleet, 3, handle, lambda: publish(3, new)))
    assert not (tmp_path / "fault").exists()
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (1, 1)
    assert len(completions) == 6
    for completion in completions:
        assert completion.finish_reason in ("stop", "length")
        assert [span.version for span in completion.spans] in ([2], [3])  # [2]: it had ended before
    assert [3] in [[span.version for span in completion.spans] for completion in completions]
    assert reloaded.is_set() == late
    assert fleet.lost == {}
    assert run(fleet.check_weights(new)) == 1


def test_a_process_that_is_killed_in_mid_load(fleet, run, publish, weights, tmp_path):
    """It is started anew and takes the policy; the requests wait for it; the next sync is as any other."""
    log = fleet.engines[0].log
    new = changed(weights, seed=4)
    (tmp_path / "fault").touch()
    handle = publish(4, new) | {"fault": {"kind": "kill", "file": str(tmp_path / "fault")}}
    metrics, completions = run(synchronise(fleet, 4, handle, pytest.fail))
    assert not (tmp_path / "fault").exists()
    assert metrics["sync/failed_engines"] == 1
    assert len(completions) == 6
    assert fleet.lost == {}
    assert run(fleet.check_weights(new)) == 1
    assert log.read_text().count("$ ") == 2  # the log of its first life is kept

    newer = changed(weights, seed=5)
    metrics, completions = run(synchronise(fleet, 5, publish(5, newer), pytest.fail))
    assert metrics["sync/failed_engines"] == 0
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
    assert run(fleet.check_weights(newer)) == 1


def test_a_policy_that_does_not_arrive_in_time(fleet, run, publish, weights, tmp_path, monkeypatch):
    """The engine goes on with what it holds; it takes the policy when it can be had."""
    run(fleet.update_weights(publish(6, weights), 6))
    new = changed(weights, seed=7)
    (tmp_path / "fault").touch()
    handle = publish(7, new) | {"fault": {"kind": "hang", "file": str(tmp_path / "fault")}}
    engine = fleet.engines[0]
    with monkeypatch.context() as patch:
        sync = engine._config.weight_sync.model_copy(update={"timeout_s": 1.0})
        patch.setattr(engine, "_config", engine._config.model_copy(update={"weight_sync": sync}))
        metrics = run(fleet.update_weights(handle, 7))
    assert metrics["sync/failed_engines"] == 1
    assert "did not receive policy version 7 within weight_sync.timeout_s 1 s" in fleet.lost["engine 0"]
    (completion,) = run(engine.generate(PROMPT, SamplingParams(8), 1))
    assert completion.spans[0].version == 6
    (tmp_path / "fault").unlink()
    assert run(fleet.reload(publish(7, new), 7))["sync/reloaded_engines"] == 1
    assert run(fleet.check_weights(new)) == 1


@pytest.mark.slow
def test_an_engine_that_dies_while_it_writes(fleet, run, publish, weights):
    """No sync is near: it is brought the policy that was published last."""

    async def kill_in_mid_decode():
        request = asyncio.create_task(fleet.generate(PROMPT, SamplingParams(400), 2))
        await asyncio.sleep(0.5)
        with contextlib.suppress(ray.exceptions.RayError):  # the fleet may already have ended the actor, too
            await fleet.engines[0]._actor.close.remote()
        return await asyncio.wait_for(request, 300)

    run(fleet.update_weights(publish(8, weights), 8))
    completions = run(kill_in_mid_decode())
    assert [span.version for completion in completions for span in completion.spans] == [8, 8]
    assert run(fleet.check_weights(weights)) == 1


@pytest.mark.slow
def test_an_engine_that_hangs(fleet, run, publish, weights):
    """It is found out within the deadlines of a sync and replaced."""
    engine = fleet.engines[0]
    session = ray.get(engine._actor.__ray_call__.remote(lambda actor: actor._server._process.pid), timeout=30)
    for process in session_members(session):
        os.kill(process, signal.SIGSTOP)
    new = changed(weights, seed=9)
    metrics, completions = run(synchronise(fleet, 9, publish(9, new), pytest.fail))
    assert metrics["sync/failed_engines"] == 1
    assert len(completions) == 6
    assert gone(session)
    assert run(fleet.check_weights(new)) == 1
