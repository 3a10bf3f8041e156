"""What a run would take if training cost nothing: its engine, environment, reward and collector, and no trainer.

    python benchmarks/paced/rollout_alone.py OVERRIDES...

Takes the overrides of `python -m rl_tpu.train` and prints the seconds from batch to batch, as JSON. The engine serves the
model as it is; versions are counted as if every batch had made a new one at once, so that the collector paces as it would.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import RunConfig
from rl_tpu.data import open_stream
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.inputs import Inputs, read_inputs
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.sampling import training_params
from rl_tpu.types import Group, Prompt, VersionSpan


async def rollout(config: RunConfig, inputs: Inputs, placement: Placement, run_dir: Path) -> list[float]:
    version = 0
    async with AsyncExitStack() as stack:
        rewards = RewardService(config.reward)
        stack.callback(rewards.close)
        rewards.start()
        started = Fleet.start(config, inputs.model_dir, run_dir, placement.engine_options(), placement.engine_chips())
        fleet = await started
        stack.push_async_callback(fleet.close)

        async def answer(prompt: Prompt) -> Group:
            drawn, params, n = version, training_params(config, prompt), config.rollout.samples_per_prompt
            samples = await inputs.environment.run(prompt, n, params, partial(fleet.generate, session=prompt.id))
            for sample in samples:
                sample.spans = [VersionSpan(drawn, 0, len(sample.response_ids))]
            await rewards.score(prompt, samples)
            return Group(-1, prompt, samples)

        collector = Collector(config, open_stream(inputs.train, config.data, config.seed), answer)
        stack.push_async_callback(collector.close)
        seconds = []
        collector.advance(0)
        for version in range(config.trainer.steps):
            since = time.perf_counter()
            await collector.batch(version)
            seconds.append(time.perf_counter() - since)
            collector.advance(version + 1)
        return seconds


def main() -> None:
    config = load_config(sys.argv[1:])
    inputs = read_inputs(config)
    with tempfile.TemporaryDirectory() as run_dir, Placement(config, ("rollout",)) as placement:
        (Path(run_dir) / "logs").mkdir()
        print(json.dumps(asyncio.run(rollout(config, inputs, placement, Path(run_dir)))))


if __name__ == "__main__":
    main()
