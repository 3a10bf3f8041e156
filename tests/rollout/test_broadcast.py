"""Fleets that take their policies by broadcast: every engine holds the trainer's bytes, and who fails comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import ray
from remote_processes import on_all, start_ranks
from tiny import changed, load_model, make_config, weights_of

from rl_tpu.rollout.fleet import Fleet
from rl_tpu.types import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "weight_sync"))
import ici_processes as ici

PROMPT = [9, 30, 31, 32, 33, 50]


@pytest.fixture(scope="module")
def config(model_dirs):
    sync = {"transport": "ici", "delivery": "broadcast", "timeout_s": 60}
    return make_config(model_dirs["tied"], rollout={"engines": 2}, weight_sync=sync)


@pytest.fixture(scope="module")
def fleet(config, model_dirs, local_ray, run, tmp_path_factory):
    fleet = run(Fleet.start(config, model_dirs["tied"], tmp_path_factory.mktemp("run"), [{"num_cpus": 0}] * 2))
    yield fleet
    run(fleet.close())


@pytest.fixture
def ranks(tmp_path, run_id):
    """Two sender ranks."""
    ranks = start_ranks(2, tmp_path / "store")
    on_all(ranks, ici.open_ici, run_id, {"timeout_s": 20, "bucket_tensors": 4})
    yield ranks
    for rank in ranks:
        rank.kill()


@pytest.fixture
def publish(ranks):
    return lambda version, weights: on_all(ranks, ici.publish_tensors, version, weights, "rows")[0]


@pytest.fixture
def weights(model_dirs):
    return weights_of(load_model(model_dirs["tied"]))


async def synchronise(fleet, version, handle, publish_whole, meanwhile=None):
    """What the loop does, with requests in flight; metrics and the requests' completions."""
    requests = [asyncio.create_task(fleet.generate([*PROMPT, i], SamplingParams(400), 2)) for i in range(4)]
    await asyncio.sleep(0.5)
    async with fleet.syncing():
        metrics, *_ = await asyncio.gather(
            fleet.update_weights(handle, version), *([meanwhile()] if meanwhile is not None else [])
        )
        if fleet.behind:
            metrics |= await fleet.reload(publish_whole(), version)
    answers = await asyncio.wait_for(asyncio.gather(*requests), 120)
    return metrics, [completion for answer in answers for completion in answer]


def test_all_engines_together_and_one_alone(fleet, config, run, publish, weights):
    links = set()
    for version in (1, 2):
        new = changed(weights, seed=version)
        metrics, completions = run(synchronise(fleet, version, publish(version, new), pytest.fail))
        assert run(fleet.check_weights(new)) == 2
        assert metrics["sync/verified_tensors"] == len(new)
        assert metrics["sync/bytes"] == sum(tensor.nbytes for tensor in new.values())
        assert metrics["sync/pause_s"] > 0 == metrics["sync/receive_s"] == metrics["sync/failed_engines"]
        assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
        links.add(fleet._delivery._updates._link)
    assert len(links) == 1  # the group of the first version serves the second
    alone = Fleet(fleet.engines[:1], config)
    newer = changed(weights, seed=3)
    metrics = run(alone.update_weights(publish(3, newer), 3))
    assert metrics["sync/failed_engines"] == 0
    assert run(alone.check_weights(newer)) == 1
    assert [span.version for span in run(alone.generate(PROMPT, SamplingParams(8)))[0].spans] == [3]


def test_a_damaged_bucket(fleet, run, ranks, publish, weights):
    """Both engines refuse it, serve on, and take it when it is sent again."""
    run(fleet.update_weights(publish(4, weights), 4))
    new = changed(weights, seed=5)
    handle = publish(5, new)
    ranks[0].call(ici.flip_a_byte, 2)
    metrics = run(fleet.update_weights(handle, 5))
    assert metrics["sync/failed_engines"] == 2
    assert all("xxh3-128 of 1 tensor(s) differs" in reason for reason in fleet.lost.values())
    assert run(fleet.engines[0].generate(PROMPT, SamplingParams(8), 1))[0].spans[0].version == 4
    assert run(fleet.reload(publish(5, new), 5))["sync/reloaded_engines"] == 2
    assert fleet.lost == {}
    assert run(fleet.check_weights(new)) == 2

    newer = changed(weights, seed=6)
    handle = publish(6, newer)
    ranks[0].call(ici.flip_a_byte, 2)
    metrics, completions = run(synchronise(fleet, 6, handle, lambda: publish(6, newer)))
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (2, 2)
    assert len(completions) == 8
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
    assert all(completion.spans[0].version == 5 for completion in completions)
    assert run(fleet.check_weights(newer)) == 2


def test_an_engine_that_dies_in_mid_broadcast(fleet, run, ranks, publish, weights):
    """The other keeps what it held and takes the version alone; the dead one is started anew and is sent it too."""
    run(fleet.update_weights(publish(7, weights), 7))
    survivor, victim = fleet.engines
    actor = ray.get(victim._actor.__ray_call__.remote(lambda actor: os.getpid()), timeout=30)
    new = changed(weights, seed=8)
    handle = publish(8, new)
    ranks[0].call(ici.send_slowly, 0.3)

    async def kill_in_mid_broadcast():
        await asyncio.sleep(0.8)
        os.kill(actor, signal.SIGKILL)

    metrics, completions = run(synchronise(fleet, 8, handle, lambda: publish(8, new), kill_in_mid_broadcast))
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (2, 1)
    assert len(completions) == 8
    assert run(survivor.generate(PROMPT, SamplingParams(8), 1))[0].spans[0].version == 8

    async def restarted():
        while fleet.lost:
            await asyncio.sleep(0.1)

    run(asyncio.wait_for(restarted(), 180))
    assert run(fleet.check_weights(new)) == 2
    newer = changed(weights, seed=9)
    assert run(fleet.update_weights(publish(9, newer), 9))["sync/failed_engines"] == 0
    assert run(fleet.check_weights(newer)) == 2
