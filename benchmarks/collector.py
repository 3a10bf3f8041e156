"""Tokens per second through environment, collector and fleet, beside the same engine driven by a plain client.

    python benchmarks/collector.py --json FILE

Both drive one engine process, in turn, with the same requests. docs/benchmarks.md says what is compared and why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import ray
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import rl_tpu  # noqa: E402, F401 - before torch, which would load the TPU's backend
from benchmarks.whole_step import task  # noqa: E402
from rl_tpu.config.compose import load_config  # noqa: E402
from rl_tpu.config.schema import RunConfig  # noqa: E402
from rl_tpu.data import open_stream  # noqa: E402
from rl_tpu.orchestrator.answers import Answers  # noqa: E402
from rl_tpu.orchestrator.collector import Collector  # noqa: E402
from rl_tpu.orchestrator.inputs import Inputs, read_inputs  # noqa: E402
from rl_tpu.rewards import RewardService  # noqa: E402
from rl_tpu.rollout.drafts import Draft  # noqa: E402
from rl_tpu.rollout.fleet import Fleet  # noqa: E402
from rl_tpu.rollout.responses import request_body  # noqa: E402
from rl_tpu.rollout.sglang import KEEP_ALIVE_S, SGLangEngine, vocabulary_size  # noqa: E402

AT_LEAST = 0.95
"""Of the bare server's tokens per second."""
SAME_TOKENS = 0.02
"""Samples of the same seeds may part where two tokens are equally likely but for rounding; so far may totals be apart."""
COLLECTOR, PER_PROMPT, PER_SAMPLE = "collector", "bare, a request per prompt", "bare, a request per sample"


def overrides(workload: str, directory: Path) -> list[str]:
    """Of the quickstart's configuration: 16 prompts with 8 answers each, which is 128 samples at a time."""
    fixed = ["+experiment=quickstart", "evaluation=none", "algorithm.drop_uniform_groups=false"]
    if workload == "short":
        return fixed
    shape = task.WORKLOADS[workload]
    return [
        *fixed,
        f"model.path={directory / 'model'}",
        "model.make=null",
        "data.train.kind=file",
        f"data.train.path={directory / 'prompts.jsonl'}",
        "data.train.task=null",
        "data.train.task_options={}",
        "data.train.part=all",
        "data.train.template='{prompt}'",
        f"data.max_prompt_tokens={shape.prompt_tokens}",
        "reward.name=benchmarks.whole_step.ours:digits",
        "reward.options={}",
        f"rollout.prompts_per_step={shape.prompts}",
        f"rollout.samples_per_prompt={task.ANSWERS}",
        f"rollout.max_response_tokens={shape.longest}",
        f"rollout.context_tokens={shape.prompt_tokens + shape.longest}",
        "rollout.kv_cache_tokens=65536",
        "trainer.row_tokens=[512]",  # no trainer is started
        "trainer.microbatch_tokens=null",
    ]


@dataclass
class Requests:
    """Notes what the engine is asked for, step by step, to ask for it again without us."""

    engine: SGLangEngine
    steps: list[list[list[Draft]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._write = self.engine.write
        self.engine.write = self._note

    def _note(self, drafts: list[Draft]) -> Awaitable[None]:
        self.steps[-1].append([Draft(draft.prompt_ids, draft.params) for draft in drafts])
        return self._write(drafts)

    def bodies(self, vocabulary: int, per_sample: bool) -> list[list[dict[str, Any]]]:
        """By step; answers come whole instead of streamed."""
        requests = [
            [part for drafts in step for part in ([[draft] for draft in drafts] if per_sample else [drafts])]
            for step in self.steps
        ]
        return [
            [request_body(drafts, vocabulary, seeded=True) | {"stream": False} for drafts in step] for step in requests
        ]


async def collect(config: RunConfig, stream: Any, answers: Answers, requests: Requests, steps: int) -> int:
    """Take steps as the loop does, each of its own collector because no policy is trained; tokens of the answers."""
    tokens = 0
    requests.steps = []
    for _ in range(steps):
        requests.steps.append([])
        collector = Collector(config, stream, answers)
        collector.advance(0)
        groups = await collector.batch(0)
        tokens += sum(len(sample.response_ids) for group in groups for sample in group.samples)
        await collector.close()
    return tokens


async def drive(session: aiohttp.ClientSession, url: str, steps: list[list[dict[str, Any]]]) -> int:
    """The plain client: all requests of a step at once, then the next step."""

    async def ask(body: dict[str, Any]) -> int:
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        return sum(len(sample["output_ids"]) for sample in (answer if isinstance(answer, list) else [answer]))

    return sum([sum(await asyncio.gather(*map(ask, step))) for step in steps])


async def rounds_of(config: RunConfig, inputs: Inputs, directory: Path, options: argparse.Namespace) -> list[dict]:
    """By round and side: tokens, and tokens per second. The first round, which does not count, warms all up."""
    stream = open_stream(inputs.train, config.data, config.seed)
    async with AsyncExitStack() as stack:
        rewards = RewardService(config.reward)
        stack.callback(rewards.close)
        rewards.start()
        fleet = await Fleet.start(config, inputs.model_dir, directory, [{"num_cpus": 0}])
        stack.push_async_callback(fleet.close)
        (engine,) = fleet.engines
        requests, vocabulary = Requests(engine), vocabulary_size(inputs.model_dir)
        answers = Answers(config, inputs.environment, fleet, rewards)
        timeout = aiohttp.ClientTimeout(total=config.rollout.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))

        async def timed(work: Callable[[], Awaitable[int]]) -> dict[str, float]:
            async with session.post(f"{engine.url}/flush_cache") as response:
                response.raise_for_status()
            start = time.perf_counter()
            tokens = await work()
            return {"tokens": tokens, "tokens_per_s": tokens / (time.perf_counter() - start)}

        rounds = []
        for number in range(options.rounds + 1):
            found = {COLLECTOR: await timed(lambda: collect(config, stream, answers, requests, options.steps))}
            for name, per_sample in ((PER_PROMPT, False), (PER_SAMPLE, True)):
                bodies = requests.bodies(vocabulary, per_sample)
                found[name] = await timed(lambda bodies=bodies: drive(session, engine.url, bodies))
            totals = [side["tokens"] for side in found.values()]
            if max(totals) > (1 + SAME_TOKENS) * min(totals):
                sys.exit(f"the sides wrote different numbers of tokens: {totals}")
            print(f"round {number}: {found}", file=sys.stderr, flush=True)
            rounds.append(found)
        return rounds[1:]


def ratio(found: dict[str, dict[str, float]]) -> float:
    """Of one round: the collector's tokens per second over those of the faster plain client."""
    return found[COLLECTOR]["tokens_per_s"] / max(found[name]["tokens_per_s"] for name in (PER_PROMPT, PER_SAMPLE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of 128 samples that each side takes in a round")
    parser.add_argument("--only", choices=["short", "w1"], help="one of the workloads")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        task.write(directory)
        workloads = [options.only] if options.only else ["short", "w1"]
        for workload, config in [(name, load_config(overrides(name, directory))) for name in workloads]:
            inputs = read_inputs(config)
            rounds = asyncio.run(rounds_of(config, inputs, directory, options))
            ratios = [ratio(found) for found in rounds]
            measured[workload] = {"ratio": statistics.median(ratios), "ratios": ratios, "rounds": rounds}
    ray.shutdown()
    if options.json:
        facts = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
        options.json.write_text(
            json.dumps({**facts, "cores": os.cpu_count(), "at_least": AT_LEAST, **measured}, indent=1)
        )
    Console(width=120).print(_table(measured))


def _table(measured: dict[str, Any]) -> Table:
    table = Table("tokens/s, medians", COLLECTOR, PER_PROMPT, PER_SAMPLE, "ratio", "least", "most", "at least")
    for workload, found in measured.items():
        medians = [
            statistics.median(each[side]["tokens_per_s"] for each in found["rounds"])
            for side in (COLLECTOR, PER_PROMPT, PER_SAMPLE)
        ]
        ratios = found["ratio"], min(found["ratios"]), max(found["ratios"]), AT_LEAST
        table.add_row(workload, *(f"{value:,.0f}" for value in medians), *(f"{value:.3f}" for value in ratios))
    return table


if __name__ == "__main__":
    main()
