"""Pacing, filtering and saving of the collector, with answers that take a controlled time."""

import asyncio
import json
import random

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.data import PromptStream
from rl_tpu.errors import RunError
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.state import decode_state, encode_state
from rl_tpu.types import Group, Prompt, Sample, VersionSpan

PROMPTS = [Prompt(id=str(i), ids=(i,), answer=str(i)) for i in range(50)]


def config(*overrides):
    return load_config(["+experiment=quickstart", "rollout.prompts_per_step=4", *overrides])


class Engine:
    """Answers every prompt with two samples under its current version after a random number of loop turns."""

    def __init__(self, rewards=(0.0, 1.0), seed=0):
        self.version, self.rewards, self.answered = 0, rewards, []
        self.random = random.Random(seed)

    async def answer(self, prompt):
        version = self.version
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)
        self.answered.append(prompt.id)
        rewards = self.rewards(prompt) if callable(self.rewards) else self.rewards
        samples = [
            Sample([*prompt.ids], [1], [1], [-0.5], [VersionSpan(version, 0, 1)], "stop", reward=reward)
            for reward in rewards
        ]
        return Group(-1, prompt, samples)


async def run(collector, engine, steps, start=0):
    batches = []
    collector.advance(start)
    for step in range(start, start + steps):
        batches.append(await collector.batch(step))
        engine.version = step + 1
        collector.advance(step + 1)
    return batches


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_stays_within_the_bound_and_reaches_it(staleness):
    engine = Engine()
    collector = Collector(config(f"rollout.max_staleness={staleness}"), PromptStream(PROMPTS), engine.answer)
    batches = asyncio.run(run(collector, engine, 12))
    lags = [step - group.samples[0].oldest_version for step, batch in enumerate(batches) for group in batch]
    assert max(lags) == staleness
    assert min(lags) >= 0


@pytest.mark.parametrize("stale_groups", ["wait", "drop"])
def test_an_engine_that_keeps_an_old_policy_ends_the_run(stale_groups):
    engine, stuck = Engine(), Engine()
    settings = config("rollout.max_staleness=1", f"rollout.stale_groups={stale_groups}")
    collector = Collector(settings, PromptStream(PROMPTS), stuck.answer)
    with pytest.raises(RunError, match=r"group \d+ is 2 versions old, the bound is 1"):
        asyncio.run(run(collector, engine, 12))


def test_old_groups_train_where_they_are_corrected():
    correction = ["algorithm.old_logprobs=recompute", "algorithm.correction.mode=truncate"]
    settings = config("rollout.max_staleness=1", "rollout.stale_groups=correct", *correction)
    collector, shares = Collector(settings, PromptStream(PROMPTS), Engine().answer), []

    async def all_steps():
        for step in range(4):
            collector.advance(step)
            assert len(await collector.batch(step)) == 4
            shares.append(collector.metrics["rollout/stale_share"])

    asyncio.run(all_steps())
    assert shares == [0, 0, 1, 1]


def test_an_answer_that_fails_is_heard_of_although_enough_are_ready():
    async def answer(prompt):
        if prompt.id == "7":
            raise RunError("engine 0 died")
        return Group(-1, prompt, [Sample([1], [1], [1], [-0.5], [VersionSpan(0, 0, 1)], "stop", reward=1.0)])

    async def one_step():
        collector = Collector(config("rollout.max_staleness=1"), PromptStream(PROMPTS, shuffle=False), answer)
        collector.advance(0)
        with pytest.raises(RunError, match="engine 0 died"):
            await collector.batch(0)
        return collector.state()

    state = asyncio.run(one_step())
    assert len(state["ready"]) == 7
    assert [prompt.id for _, prompt in state["in_flight"]] == ["7"], "its prompt is not lost"


def test_synchronous_batches_are_the_prompts_in_order():
    engine = Engine(seed=3)
    collector = Collector(config(), PromptStream(PROMPTS, shuffle=False), engine.answer)
    batches = asyncio.run(run(collector, engine, 3))
    assert [[group.prompt.id for group in batch] for batch in batches] == [
        list(map(str, range(i, i + 4))) for i in (0, 4, 8)
    ]


def test_uniform_groups_are_dropped_and_replaced():
    engine = Engine(rewards=lambda prompt: (1.0, 1.0) if int(prompt.id) % 3 == 0 else (0.0, 1.0))
    collector = Collector(
        config("algorithm.drop_uniform_groups=true"), PromptStream(PROMPTS, shuffle=False), engine.answer
    )
    batch = asyncio.run(run(collector, engine, 1))[0]
    assert [group.prompt.id for group in batch] == ["1", "2", "4", "5"]


def test_when_every_group_is_uniform_the_bound_on_draws_ends_the_step():
    engine = Engine(rewards=(1.0, 1.0))
    settings = config("algorithm.drop_uniform_groups=true", "algorithm.max_generation_batches=3")
    collector = Collector(settings, PromptStream(PROMPTS, shuffle=False), engine.answer)

    async def one_step():
        collector.advance(0)
        return await collector.batch(0)

    batch = asyncio.run(one_step())
    assert len(batch) == 4
    assert len(engine.answered) == 12


@pytest.mark.parametrize("staleness", [0, 2])
def test_used_up_prompts_end_the_run_after_the_last_whole_batch(staleness):
    engine = Engine(seed=4)
    settings = config(f"rollout.max_staleness={staleness}", "trainer.steps=100")
    collector = Collector(settings, PromptStream(PROMPTS, epochs=1), engine.answer)
    batches = asyncio.run(run(collector, engine, 14))
    assert [len(batch) for batch in batches] == [4] * 12 + [0, 0]
    assert len(set(engine.answered)) == len(engine.answered) == 50


def test_a_failing_answer_reaches_the_loop():
    async def answer(prompt):
        raise RunError("engine 0 died")

    async def one_step():
        collector = Collector(config(), PromptStream(PROMPTS), answer)
        try:
            await run(collector, Engine(), 1)
        finally:
            await collector.close()

    with pytest.raises(RunError, match="engine 0 died"):
        asyncio.run(one_step())


def test_a_restored_collector_answers_every_prompt_the_uninterrupted_one_does():
    settings = config("rollout.max_staleness=2")

    async def interrupted():
        engine = Engine(seed=1)
        first = Collector(settings, PromptStream(PROMPTS, seed=5), engine.answer)
        batches = await run(first, engine, 3)
        saved = json.loads(json.dumps(encode_state({"collector": first.state()})))
        await first.close()
        second = Collector(settings, PromptStream(PROMPTS, seed=5), engine.answer)
        second.restore(decode_state(saved, PROMPTS)["collector"])
        return batches + await run(second, engine, 3, start=3)

    async def whole():
        engine = Engine(seed=1)
        return await run(Collector(settings, PromptStream(PROMPTS, seed=5), engine.answer), engine, 6)

    def indices(batches):
        return sorted(group.index for batch in batches for group in batch)

    cut, uncut = asyncio.run(interrupted()), asyncio.run(whole())
    assert len(set(indices(cut))) == len(indices(cut)) == 24
    prompts = {group.index: group.prompt.id for batch in uncut for group in batch}
    for batch in cut:
        for group in batch:
            assert prompts.get(group.index, group.prompt.id) == group.prompt.id


def test_nothing_is_drawn_for_steps_after_the_last():
    engine = Engine()
    settings = config("rollout.max_staleness=2", "trainer.steps=5")
    asyncio.run(run(Collector(settings, PromptStream(PROMPTS), engine.answer), engine, 5))
    assert len(engine.answered) == 5 * 4


def test_the_bound_on_draws_does_not_lower_the_staleness():
    engine = Engine()
    settings = config("rollout.max_staleness=2", "algorithm.max_generation_batches=1")
    batches = asyncio.run(run(Collector(settings, PromptStream(PROMPTS), engine.answer), engine, 6))
    assert max(step - group.samples[0].oldest_version for step, batch in enumerate(batches) for group in batch) == 2


def test_ready_groups_that_leave_no_room_do_not_stop_the_loop():
    async def one_step():
        collector = Collector(config("rollout.max_staleness=1"), PromptStream(PROMPTS), Engine().answer)
        old = Engine()
        state = collector.state()
        state["ready"] = [await old.answer(prompt) for prompt in PROMPTS[:12]]
        collector.restore({**state, "consumed": 24})
        collector.advance(1)
        return await collector.batch(1)

    assert len(asyncio.run(asyncio.wait_for(one_step(), 10))) == 4
