"""kill -9 of engines in mid-generation: what they wrote is gone on with elsewhere, and they come back with the newest
policy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
import ray
import torch
from broken_connections import BreakingProxy
from processes import engine_files, session_members
from tiny import changed, load_model, reference_logprobs, weights_of

from rl_tpu.errors import RunError
from rl_tpu.rollout.engine import EngineLostError
from rl_tpu.rollout.responses import STREAM_TOKENS
from rl_tpu.types import Completion, SamplingParams

PROMPT = [9, 30, 31, 32, 33, 50]
TOKENS = 500
REQUESTS, SAMPLES = 4, 4


@pytest.fixture
def base(model_dirs) -> dict[str, torch.Tensor]:
    return weights_of(load_model(model_dirs["tied"]))


@pytest.fixture
def holding(model_dirs):
    """Transformers' model with given weights."""

    def load(weights):
        model = load_model(model_dirs["tied"])
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        return model

    return load


@pytest.fixture
def writing(fleet, monkeypatch) -> dict[str, list]:
    """The samples that each engine was given, by its name."""
    given: dict[str, list] = {engine.name: [] for engine in fleet.engines}
    for engine in fleet.engines:

        def noting(drafts, engine=engine, write=engine.write):
            given[engine.name] += drafts
            return write(drafts)

        monkeypatch.setattr(engine, "write", noting)
    return given


@pytest.fixture
def retract(fleet, monkeypatch) -> None:
    """After an update all tokens so far are computed again, so that transformers can tell what comes next."""
    sync = fleet._config.weight_sync.model_copy(update={"pause_mode": "retract"})
    config = fleet._config.model_copy(update={"weight_sync": sync})
    for part in (fleet, *fleet.engines):
        monkeypatch.setattr(part, "_config", config)


def session_of(engine) -> int:
    return ray.get(engine._actor.__ray_call__.remote(lambda actor: actor._server._process.pid), timeout=30)


def kill_all(engine) -> None:
    for process in session_members(session_of(engine)):
        os.kill(process, signal.SIGKILL)


def kill_scheduler(engine) -> None:
    processes = map(psutil.Process, session_members(session_of(engine)))
    (scheduler,) = [process for process in processes if "scheduler" in " ".join([process.name(), *process.cmdline()])]
    scheduler.kill()


def requests(fleet) -> list[asyncio.Task[list[Completion]]]:
    prompts = ([*PROMPT, i] for i in range(REQUESTS))
    return [asyncio.create_task(fleet.generate(prompt, SamplingParams(TOKENS), SAMPLES)) for prompt in prompts]


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> float:
    """Seconds until it holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + timeout_s
        await asyncio.sleep(0.02)
    return time.monotonic() - start


async def until_half_written(drafts: list) -> None:
    await until(lambda: any(len(d.response_ids) > STREAM_TOKENS and not d.finished for d in drafts))


async def ask_each(fleet) -> list[list[Completion]]:
    return await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(8), 2) for engine in fleet.engines))


def check_samples(answers: list[list[Completion]], logprobs: Callable[[list[int], Completion], torch.Tensor]) -> None:
    """Of `requests`: all are there and whole, and their log-probabilities are the expected ones."""
    assert [len(completions) for completions in answers] == [SAMPLES] * REQUESTS
    for number, completions in enumerate(answers):
        for completion in completions:
            check_sample(completion, logprobs([*PROMPT, number], completion))


def check_sample(completion: Completion, logprobs: torch.Tensor) -> None:
    tokens = len(completion.response_ids)
    assert completion.finish_reason == ("length" if tokens == TOKENS else "stop")
    assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans[:-1])]
    assert completion.spans[-1].end == tokens
    assert torch.allclose(torch.tensor(completion.logprobs), logprobs, rtol=0, atol=1e-4)


def test_all_processes_of_a_server(fleet, run, publish, base, holding, writing):
    """The samples stay those of the policy that began them. It comes back with one published meanwhile."""
    run(fleet.update_weights(publish(1, base), 1))
    victim = fleet.engines[0]
    files = engine_files(session_of(victim))

    async def kill_in_mid_generation():
        answers = requests(fleet)
        await until_half_written(writing[victim.name])
        kill_all(victim)
        return await asyncio.gather(*answers)

    new = changed(base, seed=1)
    answers = run(kill_in_mid_generation())
    assert list(fleet.lost) == [victim.name]
    policy = holding(base)
    check_samples(answers, lambda prompt, c: reference_logprobs(policy, prompt, c.response_ids))
    assert {span.version for completions in answers for c in completions for span in c.spans} == {1}

    metrics = run(fleet.update_weights(publish(2, new), 2))  # while it is started anew
    assert metrics["rollout/resumed_samples"] >= 1
    assert metrics["rollout/reused_tokens"] > STREAM_TOKENS
    assert metrics["sync/failed_engines"] == 1
    assert run(until(lambda: not fleet.lost, fleet._config.rollout.start_timeout_s)) > 0
    assert run(fleet.check_weights(new)) == 2
    for completions in run(ask_each(fleet)):
        assert {span.version for c in completions for span in c.spans} == {2}
    assert not [file for file in files if file.exists()]
    metrics = run(fleet.update_weights(publish(3, new), 3))
    assert (metrics["rollout/resumed_samples"], metrics["rollout/reused_tokens"]) == (0, 0)
    assert metrics["sync/failed_engines"] == 0


@pytest.mark.slow
def test_its_scheduler_in_an_update(fleet, run, publish, base, holding, writing, retract, monkeypatch):
    """The other engine has taken the new policy when the scheduler dies, and goes on with the old one's samples."""
    old, new = changed(base, seed=2), changed(base, seed=3)
    run(fleet.update_weights(publish(4, old), 4))
    victim, other = fleet.engines
    killed = asyncio.Event()

    async def stage_late(handle, version, stage=victim.stage):
        await killed.wait()
        return await stage(handle, version)

    monkeypatch.setattr(victim, "stage", stage_late)

    async def kill_in_mid_update():
        answers = requests(fleet)
        await until_half_written(writing[victim.name])
        update = asyncio.create_task(fleet.update_weights(publish(5, new), 5))
        await until(lambda: other.name in fleet._updates)
        unfinished = [draft for draft in writing[victim.name] if not draft.finished]
        kill_scheduler(victim)
        killed.set()
        return unfinished, await asyncio.gather(*answers), await update

    unfinished, answers, metrics = run(kill_in_mid_update())
    assert metrics["sync/failed_engines"] == 1
    assert [4, 5] in [[span.version for span in draft.spans] for draft in unfinished]
    before, after = holding(old), holding(new)

    def over_the_joint(prompt, completion):
        first = sum(span.end - span.start for span in completion.spans if span.version == 4)
        by_both = [reference_logprobs(model, prompt, completion.response_ids) for model in (before, after)]
        return torch.cat([by_both[0][:first], by_both[1][first:]])

    check_samples(answers, over_the_joint)
    run(until(lambda: not fleet.lost, fleet._config.rollout.start_timeout_s))
    assert run(fleet.check_weights(new)) == 2


@pytest.mark.parametrize("how", ["cut", "end"])
def test_a_broken_connection(fleet, run, publish, base, holding, how, monkeypatch):
    """The server lives: the samples are gone on with there as long as each answer brings something."""
    run(fleet.update_weights(publish(5, base), 5))
    policy, engine = holding(base), fleet.engines[0]

    async def answers(times, events):
        async with BreakingProxy(engine.url, how, times, events) as proxy:
            with monkeypatch.context() as patch:
                patch.setattr(engine, "url", proxy.url)
                return proxy, await engine.generate(PROMPT, SamplingParams(TOKENS), SAMPLES)

    proxy, completions = run(answers(times=2, events=6))
    assert proxy.broken == 2
    assert len(completions) == SAMPLES
    for completion in completions:
        check_sample(completion, reference_logprobs(policy, PROMPT, completion.response_ids))
        assert [span.version for span in completion.spans] == [5]
    with pytest.raises(RunError, match=r"engine 0 broke off /generate: .*\(log: "):
        run(answers(times=2, events=0))
    assert fleet.lost == {}


def test_an_engine_set_aside_keeps_its_policy(fleet, run, publish, base, holding):
    """Over updates, which the others take and which do not count it as failed. Then it takes the newest."""
    new = changed(base, seed=4)
    run(fleet.update_weights(publish(6, base), 6))

    async def evaluate():
        async with fleet.set_aside() as evaluator:
            begun = asyncio.create_task(evaluator.generate(PROMPT, SamplingParams(TOKENS), SAMPLES))
            metrics = [await fleet.update_weights(publish(version, new), version) for version in (7, 8)]
            beside = await fleet.generate(PROMPT, SamplingParams(8), 2)
            with pytest.raises(RunError, match="no engine can be set aside: 1 of 2 serve"):
                async with fleet.set_aside():
                    pass
            later = await evaluator.generate(PROMPT, SamplingParams(TOKENS), SAMPLES)
        last = await fleet.update_weights(publish(9, new), 9)  # it may be taking that version just now
        await until(lambda: not fleet._restarts)
        assert fleet.behind == []
        return [*metrics, last], await begun, beside, later

    metrics, begun, beside, later = run(evaluate())
    assert [row["sync/failed_engines"] for row in metrics] == [0, 0, 0]
    policy = holding(base)
    for completion in [*begun, *later]:
        assert [span.version for span in completion.spans] == [6]
        check_sample(completion, reference_logprobs(policy, PROMPT, completion.response_ids))
    assert {span.version for completion in beside for span in completion.spans} == {8}
    assert run(fleet.check_weights(new)) == 2
    for completions in run(ask_each(fleet)):
        assert {span.version for completion in completions for span in completion.spans} == {9}


@pytest.mark.slow
def test_an_engine_set_aside_is_killed(fleet, run, publish, base, writing):
    """It serves again, but not the policy that it was to keep: who evaluates is told."""
    run(fleet.update_weights(publish(10, base), 10))

    async def evaluate():
        async with fleet.set_aside() as evaluator:
            (engine,) = [engine for engine in fleet.engines if engine.name == evaluator.engine]
            begun = asyncio.create_task(evaluator.generate(PROMPT, SamplingParams(TOKENS), SAMPLES))
            await until_half_written(writing[engine.name])
            kill_all(engine)
            with pytest.raises(EngineLostError, match="ended with exit code -9"):
                await begun
            metrics = await fleet.update_weights(publish(11, base), 11)
            assert metrics["sync/failed_engines"] == 0
            await until(lambda: not fleet.lost, fleet._config.rollout.start_timeout_s)
            with pytest.raises(EngineLostError, match="ended with exit code -9"):
                await evaluator.generate(PROMPT, SamplingParams(8))

    run(evaluate())
    assert run(fleet.check_weights(base)) == 2
    for completions in run(ask_each(fleet)):
        assert {span.version for completion in completions for span in completion.spans} == {11}
