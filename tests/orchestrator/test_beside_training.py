"""The bookkeeping around an evaluation beside training, with parts that break when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from rl_tpu.errors import RunError
from rl_tpu.orchestrator import loop
from rl_tpu.orchestrator.beside_training import BesideTraining
from rl_tpu.orchestrator.evaluation import EvalResult
from rl_tpu.rollout.engine import EngineLostError
from rl_tpu.types import Group, Prompt, Sample, VersionSpan


class Fleet:
    """Lends one engine, if it has one to spare; says what is aside."""

    def __init__(self, spare: bool = True) -> None:
        self.spare, self.aside, self.version = spare, 0, 0

    @contextlib.asynccontextmanager
    async def set_aside(self):
        if not self.spare:
            raise RunError("no engine can be set aside: 1 of 2 serve")
        self.aside += 1
        try:
            yield SimpleNamespace(version=self.version)
        finally:
            self.aside -= 1


class Tracker:
    def __init__(self) -> None:
        self.rows, self.messages = [], []

    def timer(self, part: str):
        return contextlib.nullcontext()

    def evaluation(self, step, version, results) -> None:
        self.rows.append((step, version, results["sums"]["pass@1"]))

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def job(monkeypatch):
    """A run whose evaluations end when ``gate`` is set, with ``fault`` if there is one."""
    config = SimpleNamespace(evaluation=SimpleNamespace(every_steps=2, beside_training=True))
    fleet = Fleet()
    run = SimpleNamespace(
        config=config,
        fleet=fleet,
        answers=SimpleNamespace(fleet=fleet, environment=None, rewards=None),
        eval_sets=["sums"],
        tracker=Tracker(),
        beside=BesideTraining(),
        step=0,
        evaluated_step=-1,
    )
    run.gate, run.fault = asyncio.Event(), None

    async def evaluate(sets, config, environment, engines, rewards):
        version = engines.version
        await run.gate.wait()
        if run.fault:
            raise run.fault
        sample = Sample([1], [2], [1], [0.0], [VersionSpan(version, 0, 1)], "stop")
        return {"sums": EvalResult({"pass@1": 0.5}, [Group(0, Prompt("p", (1,), "4"), [sample])], [{}])}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    return run


def policy(job, step: int) -> None:
    job.step = job.fleet.version = step


def test_a_policy_is_evaluated_while_the_next_ones_come(job):
    async def scenario():
        policy(job, 2)
        await loop.evaluation(job, beside=True)
        assert (job.fleet.aside, job.beside.busy, job.tracker.rows) == (1, True, [])
        policy(job, 3)
        assert not loop.evaluation_due(job)
        await loop.settle_evaluation(job, wait=False)
        assert job.beside.busy
        policy(job, 4)
        assert loop.evaluation_due(job)
        following = asyncio.create_task(loop.evaluation(job, beside=True))
        await asyncio.sleep(0.01)
        assert not following.done()  # it waits for the first
        job.gate.set()
        await following
        await loop.settle_evaluation(job)
        assert job.tracker.rows == [(2, 2, 0.5), (4, 4, 0.5)]
        assert (job.fleet.aside, job.evaluated_step) == (0, 4)
        await loop.evaluation(job)  # the same policy again: nothing to do
        assert len(job.tracker.rows) == 2

    asyncio.run(scenario())


def test_without_an_engine_to_spare_training_waits(job):
    async def scenario():
        job.fleet.spare = False
        policy(job, 2)
        job.gate.set()
        await loop.evaluation(job, beside=True)
        assert job.tracker.rows == [(2, 2, 0.5)]
        assert "1 of 2 serve" in job.tracker.messages[0]

    asyncio.run(scenario())


def test_an_evaluation_that_lost_its_engine_is_made_up_for(job):
    async def scenario():
        policy(job, 2)
        job.fault = EngineLostError("engine 1 was killed")
        await loop.evaluation(job, beside=True)
        job.gate.set()
        await asyncio.sleep(0.01)
        policy(job, 3)
        await loop.settle_evaluation(job, wait=False)
        assert "engine 1 was killed" in job.tracker.messages[0]
        assert loop.evaluation_due(job)
        job.fault = None
        await loop.evaluation(job, beside=True)
        await loop.settle_evaluation(job)
        assert job.tracker.rows == [(3, 3, 0.5)]
        assert not loop.evaluation_due(job)

    asyncio.run(scenario())


def test_any_other_error_ends_the_run(job):
    async def scenario():
        policy(job, 2)
        job.fault = RunError("the reward failed")
        job.gate.set()
        await loop.evaluation(job, beside=True)
        with pytest.raises(RunError, match="the reward failed"):
            await loop.settle_evaluation(job)
        assert job.fleet.aside == 0

    asyncio.run(scenario())


def test_answers_of_another_policy_are_no_evaluation(job):
    async def scenario():
        job.step, job.fleet.version = 2, 1
        job.gate.set()
        with pytest.raises(RunError, match="policy version 2 holds answers of version 1"):
            await loop.evaluation(job)

    asyncio.run(scenario())


def test_what_goes_on_is_broken_off_at_the_end_and_waiting_for_it_can_be(job):
    async def scenario():
        policy(job, 2)
        await loop.evaluation(job, beside=True)
        waiting = asyncio.create_task(loop.settle_evaluation(job))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (job.fleet.aside, job.beside.busy) == (1, True)  # an interrupt ends the waiting, not yet the work
        await job.beside.close()
        assert (job.fleet.aside, job.beside.busy, job.tracker.rows) == (0, False, [])
        await BesideTraining().close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("step", "every", "evaluated", "due"),
    [(4, 2, 2, True), (5, 2, 4, False), (5, 2, 3, True), (5, 0, 0, False), (1, 2, 0, False), (1, 2, -1, True)],
)
def test_when_one_is_due(job, step, every, evaluated, due):
    job.step, job.evaluated_step, job.config.evaluation.every_steps = step, evaluated, every
    assert loop.evaluation_due(job) is due
