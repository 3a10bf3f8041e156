"""Two real engines as one, and what happens when one of them breaks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter

import pytest
import ray
import torch
from processes import engine_files, gone, session_members
from tiny import changed, load_model, reference_logprobs, weights_of

from rl_tpu.errors import RunError
from rl_tpu.types import SamplingParams

PROMPT = [9, 30, 31, 32, 33, 50]


@pytest.fixture
def policy(model_dirs):
    return load_model(model_dirs["tied"])


async def restarted(fleet) -> None:
    while fleet.lost:
        await asyncio.sleep(0.1)


async def requests(fleet, count, tokens=16, n=2):
    return await asyncio.gather(*(fleet.generate([*PROMPT, i], SamplingParams(tokens), n) for i in range(count)))


def served_by(fleet, monkeypatch) -> Counter:
    """Counts the samples each engine is asked for."""
    counts: Counter = Counter()
    for engine in fleet.engines:

        def counting(drafts, engine=engine, write=engine.write):
            counts[engine.name] += len(drafts)
            return write(drafts)

        monkeypatch.setattr(engine, "write", counting)
    return counts


def test_requests_are_spread_by_tokens_in_flight(fleet, run, monkeypatch):
    counts = served_by(fleet, monkeypatch)

    async def mixed():
        long = fleet.generate(PROMPT, SamplingParams(200), 8)
        short = [fleet.generate(PROMPT, SamplingParams(20), 2) for _ in range(6)]
        return await asyncio.gather(long, *short)

    results = run(mixed())
    assert [len(completions) for completions in results] == [8] + [2] * 6
    # 8 x 206 tokens wait on the first engine, 6 x 2 x 26 on the other.
    assert counts == {"engine 0": 8, "engine 1": 12}
    assert set(fleet._router.tokens.values()) == set(fleet._router.samples.values()) == {0}


def test_an_update_reaches_all_engines(fleet, run, publish, policy):
    new = changed(weights_of(policy), seed=1)
    assert "lm_head.weight" not in new  # tied: it must follow the embedding
    metrics = run(fleet.update_weights(publish(1, new), 1))
    assert metrics["sync/verified_tensors"] == len(new)
    assert metrics["sync/bytes"] == sum(tensor.nbytes for tensor in new.values())
    assert metrics["sync/failed_engines"] == 0
    assert metrics["sync/receive_s"] > 0 < metrics["sync/pause_s"]
    assert run(fleet.check_weights(new)) == 2
    policy.load_state_dict(new, strict=False)
    policy.tie_weights()
    for completions in run(requests(fleet, 4)):
        for completion in completions:
            assert [span.version for span in completion.spans] == [1]

    for engine in fleet.engines:
        (completion,) = run(engine.generate(PROMPT, SamplingParams(12, temperature=0.0), 1))
        expected = reference_logprobs(policy, PROMPT, completion.response_ids)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_a_tied_output_layer_may_come_along_if_it_is_equal(fleet, run, publish, policy):
    new = changed(weights_of(policy), seed=2)
    embedding = new["model.embed_tokens.weight"]
    metrics = run(fleet.update_weights(publish(2, {**new, "lm_head.weight": embedding}), 2))
    assert metrics["sync/failed_engines"] == 0
    assert run(fleet.check_weights({**new, "lm_head.weight": embedding})) == 2
    metrics = run(fleet.update_weights(publish(3, {**new, "lm_head.weight": embedding + 1}), 3))
    assert metrics["sync/failed_engines"] == 2
    assert "lm_head.weight differs from" in fleet.lost["engine 0"]
    with pytest.raises(RunError, match=r"no engine is left: engine 0 .*; engine 1 refused"):
        run(fleet.generate(PROMPT, SamplingParams(4), 1))
    run(fleet.update_weights(publish(4, new), 4))  # whole again: back in routing
    assert fleet.lost == {}
    assert len(run(fleet.generate(PROMPT, SamplingParams(4), 3))) == 3


def test_an_engine_that_refuses_a_policy_is_reloaded_whole(fleet, run, publish, policy, monkeypatch):
    """What it has begun it finishes under the old policy; new requests go to the other one until it is back."""
    run(fleet.update_weights(publish(4, weights_of(policy)), 4))
    good = publish(5, weights_of(policy))
    damaged = {**good, "manifest_xxh3_128": "0" * 32}
    first = fleet.engines[0]
    stage = first.stage
    monkeypatch.setattr(first, "stage", lambda handle, version: stage(damaged, version))
    counts = served_by(fleet, monkeypatch)

    async def update_in_mid_decode():
        answers = asyncio.create_task(requests(fleet, 6, tokens=300))
        await asyncio.sleep(0.5)
        metrics = await fleet.update_weights(good, 5)
        assert fleet.behind == [first]
        assert "the manifest in" in fleet.lost["engine 0"]
        before = counts["engine 0"]
        await requests(fleet, 3)
        assert counts["engine 0"] == before
        return metrics, await answers

    metrics, results = run(update_in_mid_decode())
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (1, 0)
    last = [c.spans[-1].version for completions in results for c in completions if c.finish_reason == "length"]
    assert set(last) == {4, 5}
    monkeypatch.undo()
    metrics = run(fleet.reload(publish(5, weights_of(policy)), 5))
    assert (metrics["sync/failed_engines"], metrics["sync/reloaded_engines"]) == (1, 1)
    assert fleet.lost == {}
    assert fleet.behind == []


def test_other_weights_than_the_trainers_are_named(fleet, run, publish, policy):
    new = weights_of(policy)
    run(fleet.update_weights(publish(5, new), 5))
    new["model.layers.1.self_attn.v_proj.weight"][3, 3] += 1e-3
    with pytest.raises(RunError, match=r"engine \d holds other .*trainer: model.layers.1.self_attn.qkv_proj.weight$"):
        run(fleet.check_weights(new))


def test_a_run_can_be_repeated(fleet, run, publish, policy):
    """Requests without a seed get the same ones again after the same number of requests under the same version."""

    def answers(version):
        run(fleet.update_weights(publish(version, weights_of(policy)), version))
        return [[c.response_ids for c in completions] for completions in run(requests(fleet, 6))]

    first, other, again = answers(6), answers(7), answers(6)
    assert first == again != other
    assert len({tuple(ids) for completions in first for ids in completions}) == 12


def test_an_engine_that_is_killed(fleet, run, publish, policy, caplog):
    """SIGKILL of its Ray actor: no process, no file stays; its requests go to the other one; updates go on."""
    victim = fleet.engines[0]
    describe = victim._actor.__ray_call__.remote(lambda actor: (os.getpid(), actor._server._process.pid))
    actor, session = ray.get(describe, timeout=30)
    files = engine_files(session)
    assert len(session_members(session)) == 5  # first, supervisor, HTTP, scheduler, detokenizer
    assert [file for file in files if str(file).startswith("/dev/shm")]

    async def kill_in_mid_decode():
        answers = asyncio.create_task(requests(fleet, 4, tokens=300))
        await asyncio.sleep(0.5)
        os.kill(actor, signal.SIGKILL)
        return await answers

    with caplog.at_level(logging.WARNING):
        results = run(kill_in_mid_decode())
    assert [len(completions) for completions in results] == [2] * 4
    assert gone(session)
    assert not [file for file in files if file.exists()]
    assert list(fleet.lost) == ["engine 0"]
    assert "its Ray actor died" in fleet.lost["engine 0"]
    assert str(victim.log) in fleet.lost["engine 0"]
    assert "engine 0 gets no more requests" in caplog.text

    metrics = run(fleet.update_weights(publish(8, weights_of(policy)), 8))  # while it is being started
    assert metrics["sync/failed_engines"] == 1
    assert fleet.behind == []
    run(asyncio.wait_for(restarted(fleet), 120))
    assert run(fleet.check_weights(weights_of(policy))) == 2
    for engine in fleet.engines:
        assert {span.version for c in run(engine.generate(PROMPT, SamplingParams(8), 2)) for span in c.spans} == {8}


def test_an_actor_that_ray_ends(fleet, run):
    """Ray kills the children of an actor it ends; still nothing stays."""
    last = fleet.engines[1]
    session = ray.get(last._actor.__ray_call__.remote(lambda actor: actor._server._process.pid), timeout=30)
    files = engine_files(session)
    assert len(files) == 2  # shared memory and the temporary directory
    ray.kill(last._actor)
    assert gone(session)
    assert not [file for file in files if file.exists()]
    assert "its Ray actor died" in run(last.failure())
