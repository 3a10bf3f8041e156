"""The collector beside a brute-force twin on a clock of whole ticks: same groups in the same batches, the same dropped.

And what must hold whatever the pacing: the bound, no sample twice, no prompt lost, as many steps as were asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.data import PromptStream
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.state import decode_state, encode_state
from rl_tpu.types import Group, Prompt, Sample, VersionSpan

PROMPTS = [Prompt(id=str(i), ids=(i,), answer=str(i)) for i in range(1000)]
STEPS, PER_STEP = 9, 4
MODES = ("wait", "drop", "correct")
LAST = len(PROMPTS)
"""In the order of what happens in one tick: after all answers."""


@dataclass(frozen=True)
class Pacing:
    staleness: int
    oversampling: float
    mode: str
    drop_uniform: bool
    seed: int

    def config(self):
        config = base_config()
        rollout = {"max_staleness": self.staleness, "oversampling": self.oversampling, "stale_groups": self.mode}
        algorithm = {"drop_uniform_groups": self.drop_uniform}
        return config.model_copy(
            update={
                "rollout": config.rollout.model_copy(update=rollout),
                "algorithm": config.algorithm.model_copy(update=algorithm),
            }
        )

    def ticks(self, index: int) -> int:
        """How long the group's answers take: one in six is ten times longer."""
        dice = random.Random(f"{self.seed} group {index}")
        return dice.randint(1, 6) * (10 if dice.random() < 1 / 6 else 1)

    def queued(self, index: int) -> int:
        """How many of these ticks pass before its first token."""
        return random.Random(f"{self.seed} queue {index}").choice([0, 0, 0, self.ticks(index) - 1])

    def uniform(self, index: int) -> bool:
        return random.Random(f"{self.seed} rewards {index}").random() < 0.4

    def training(self, step: int) -> int:
        return random.Random(f"{self.seed} training {step}").randint(1, 8)


@cache
def base_config():
    steps = [f"rollout.prompts_per_step={PER_STEP}", f"trainer.steps={STEPS}"]
    return load_config(["+experiment=quickstart", *steps, "algorithm.max_generation_batches=2"])


SEEDS = range(2)
every_pacing = pytest.mark.parametrize(
    ("staleness", "oversampling", "mode", "drop_uniform"),
    [
        values
        for values in itertools.product((0, 1, 2, 4), (1.0, 1.5, 3.0), MODES, (False, True))
        if values[1] == 1 or (values[0] and values[2] != "wait")  # the others are refused
    ],
)


@dataclass
class World:
    """A clock, an engine that writes by it, and a trainer; it drives the real collector."""

    pacing: Pacing
    version: int = 0
    now: int = 0
    drawn: list[str] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    alarms: list[tuple[int, int, asyncio.Future]] = field(default_factory=list)

    def at(self, tick: int, order: int) -> asyncio.Future:
        """Resolved at that tick, in this order."""
        alarm = asyncio.get_running_loop().create_future()
        self.alarms.append((tick, order, alarm))
        return alarm

    async def pass_tick(self):
        self.now += 1
        due = sorted((alarm for alarm in self.alarms if alarm[0] == self.now), key=lambda alarm: alarm[1])
        self.alarms = [alarm for alarm in self.alarms if alarm[0] != self.now]
        for _, alarms in itertools.groupby(due, key=lambda alarm: alarm[1] == LAST):
            for *_, alarm in alarms:
                if not alarm.done():
                    alarm.set_result(None)
            await settle()

    async def answer(self, prompt: Prompt) -> Group:
        self.drawn.append(prompt.id)
        index, begun, end = int(prompt.id), self.version, self.now + self.pacing.ticks(int(prompt.id))
        try:
            if queued := self.pacing.queued(index):
                await self.at(self.now + queued, index)
                begun = self.version
            await self.at(end, index)
        except asyncio.CancelledError:
            self.broken_off.append(prompt.id)
            raise
        spans = [VersionSpan(begun, 0, 1), VersionSpan(self.version, 1, 2)]
        rewards = (1.0, 1.0) if self.pacing.uniform(index) else (0.0, 1.0)
        return Group(-1, prompt, [Sample([1], [2, 3], [1, 1], [-1.0] * 2, spans, "stop", reward=r) for r in rewards])

    async def train(self, collector: Collector, first: int, last: int, record: list):
        collector.advance(first)
        for step in range(first, last):
            batch = await collector.batch(step)
            record.append((batch, collector.metrics))
            await self.at(self.now + self.pacing.training(step), LAST)
            self.version = step + 1
            if step + 1 < last or last == STEPS:
                collector.advance(step + 1)

    async def run(self, collector: Collector, first: int = 0, last: int = STEPS) -> list:
        self.version, record = first, []
        training = asyncio.create_task(self.train(collector, first, last, record))
        await settle()
        while not training.done():
            assert self.now < 10_000, f"stuck after {len(record)} steps"
            await self.pass_tick()
        training.result()
        return record


async def settle():
    for _ in range(8):
        await asyncio.sleep(0)


def real(pacing: Pacing):
    async def run():
        world = World(pacing)
        collector = Collector(pacing.config(), PromptStream(PROMPTS, shuffle=False), world.answer)
        record = await world.run(collector)
        state = collector.state()
        await collector.close()
        return world, record, state

    return asyncio.run(run())


def twin(pacing: Pacing) -> list[tuple[list[int], int, int]]:
    """Indices, uniform and stale drops of every batch: everything recomputed from a table of groups at every tick."""
    k, groups, version, now = pacing.staleness, [], 0, 0
    consumed, drawn_now, stale, phase, until, batches = 0, 0, 0, "wait", 0, []

    def having(*states):
        return [g for g in groups if g["state"] in states]

    def draw():
        nonlocal drawn_now
        while True:
            kept = consumed + len(having("ready"))
            may = min((version + k + 1) * PER_STEP, STEPS * PER_STEP) - kept
            most = min(math.ceil(pacing.oversampling * may), STEPS * PER_STEP - kept)
            limit = PER_STEP + math.ceil(pacing.oversampling * (k + 1) * PER_STEP)
            if len(having("flight")) >= most or drawn_now >= limit:
                return
            index = len(groups)
            end = now + pacing.ticks(index)
            groups.append({"index": index, "state": "flight", "drawn": version, "oldest": version, "end": end})
            groups[-1]["begins"] = now + pacing.queued(index)
            drawn_now += 1

    def drop(trains):
        nonlocal stale, drawn_now
        if pacing.mode != "drop":
            return
        for g in groups:
            age = {"ready": g["oldest"], "flight": g["drawn"]}.get(g["state"], trains)
            if age < trains - k:
                g["state"] = "stale"
                stale += 1
                drawn_now -= 1

    def in_order():
        return sorted(having("ready"), key=lambda g: (g["oldest"], g["index"]))

    def enough():
        ready = in_order()
        if len(ready) < PER_STEP:
            return False
        if pacing.mode != "wait":
            return True
        # Whether those that are left can all train in time if from now on the oldest ones always do.
        left = [g["oldest"] for g in ready[PER_STEP:]] + [g["drawn"] for g in having("flight")]
        return all((version + 1 + place // PER_STEP) - age <= k for place, age in enumerate(sorted(left)))

    draw()
    while len(batches) < STEPS:
        if phase == "train" and now == until:
            version += 1
            phase = "wait"
            draw()
            drop(version)
            draw()
        if phase == "wait":
            if not enough() and not having("flight"):
                uniform = sorted(having("uniform"), key=lambda g: g["end"])
                for g in uniform[len(having("ready")) - PER_STEP :]:
                    g["state"] = "ready"
            if enough():
                batch = having("ready") if len(having("ready")) == PER_STEP else in_order()[:PER_STEP]
                for g in batch:
                    g["state"] = "trained"
                consumed += PER_STEP
                drop(version + 1)
                uniform = having("uniform")
                batches.append((sorted(g["index"] for g in batch), len(uniform), stale))
                for g in uniform:
                    g["state"] = "counted"
                stale, drawn_now = 0, len(having("ready", "flight"))
                draw()
                phase, until = "train", now + pacing.training(version)
        now += 1
        for g in having("flight"):
            if g["begins"] == now > g["end"] - pacing.ticks(g["index"]):
                g["oldest"] = version
            if g["end"] == now:
                g["state"] = "uniform" if pacing.drop_uniform and pacing.uniform(g["index"]) else "ready"
                draw()
    return batches


@every_pacing
def test_batches_and_drops_are_those_of_the_twin(staleness, oversampling, mode, drop_uniform):
    for seed in SEEDS:
        pacing = Pacing(staleness, oversampling, mode, drop_uniform, seed)
        world, record, state = real(pacing)
        counts = ("rollout/dropped_groups", "rollout/dropped_stale_groups")
        got = [(sorted(group.index for group in batch), *(int(m[name]) for name in counts)) for batch, m in record]
        assert got == twin(pacing), pacing
        check(pacing, record, state, drawn=len(world.drawn))
        assert len(set(world.drawn)) == len(world.drawn)
        assert bool(world.broken_off) <= (mode == "drop")


@every_pacing
def test_after_a_kill_nothing_is_lost_and_nothing_comes_twice(staleness, oversampling, mode, drop_uniform):
    for seed in SEEDS:
        pacing = Pacing(staleness, oversampling, mode, drop_uniform, seed)

        async def run(pacing=pacing):
            first, second = World(pacing), World(pacing)
            collector = Collector(pacing.config(), PromptStream(PROMPTS, shuffle=False), first.answer)
            record = await first.run(collector, last=4)
            saved = json.loads(json.dumps(encode_state({"collector": collector.state()})))
            waiting = {prompt for _, prompt in saved["collector"]["in_flight"]}
            await collector.close()
            collector = Collector(pacing.config(), PromptStream(PROMPTS, shuffle=False), second.answer)
            collector.restore(decode_state(saved, PROMPTS)["collector"])
            record += await second.run(collector, first=4)
            assert waiting <= set(second.drawn)
            return len(set(first.drawn) | set(second.drawn)), record, collector.state()

        drawn, record, state = asyncio.run(run())
        check(pacing, record, state, drawn)


def check(pacing: Pacing, record: list, state: dict, drawn: int) -> None:
    """Invariants of a whole run in which so many different prompts were drawn."""
    batches = [batch for batch, _ in record]
    assert [len(batch) for batch in batches] == [PER_STEP] * STEPS
    lags = [step - s.oldest_version for step, batch in enumerate(batches) for g in batch for s in g.samples]
    assert min(lags) >= 0
    assert pacing.mode == "correct" or max(lags) <= pacing.staleness
    ids = [sample.id for batch in batches for group in batch for sample in group.samples]
    assert len(set(ids)) == len(ids) == 2 * PER_STEP * STEPS
    assert all(str(group.index) == group.prompt.id for batch in batches for group in batch)
    late = [m["rollout/stale_share"] * len(batch) for batch, m in record]
    assert sum(late) == pytest.approx(sum(lag > pacing.staleness for lag in lags) / 2)

    dropped = {
        name: sum(m[f"rollout/{name}"] for _, m in record) for name in ("dropped_groups", "dropped_stale_groups")
    }
    assert pacing.drop_uniform or not dropped["dropped_groups"]
    assert pacing.mode == "drop" or not dropped["dropped_stale_groups"]
    assert drawn == PER_STEP * STEPS + sum(dropped.values()) + len(state["ready"]) + len(state["in_flight"])
    assert not state["in_flight"], "drawn in excess"
    assert not state["ready"] or pacing.drop_uniform
