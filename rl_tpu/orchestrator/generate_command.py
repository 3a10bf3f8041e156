"""The command line of generation: a training run's answers under the model it starts from. Only engines are started.

What it writes is what training writes of every step, so `replay=RUN_DIR` can train on it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from rl_tpu.config.compose import check_command_line, compose_config, validate
from rl_tpu.config.schema import RunConfig
from rl_tpu.data import open_stream
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.answers import Answers
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.inputs import Inputs, check_names, read_inputs
from rl_tpu.orchestrator.interrupt import Interrupt, Interrupted, interrupt_by_sigterm
from rl_tpu.orchestrator.job import choose_directory, exit_code, only_writer
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.tracking import RunDirectory, Tracker, rollout_metrics

USAGE = """usage: python -m rl_tpu.generate +experiment=NAME [KEY=VALUE ...]

  Draws the prompts of trainer.steps steps as training does, has them answered and scored by the model as it is, and
  writes samples/ and metrics.jsonl into the run directory. python -m rl_tpu.train ... replay=RUN_DIR learns from them.
  Without overlap of steps: rollout.max_staleness=0; with it, for more tokens/s: 1.
"""


def generate() -> None:
    """Exit codes as in training."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE, end="")
        return
    sys.exit(exit_code(lambda: run_generation(sys.argv[1:])))


def run_generation(arguments: list[str]) -> None:
    """Raises as a training job does."""
    check_command_line(arguments)
    config = validate(compose_config(arguments))
    if config.replay or config.resume != "never":
        raise UserError("rl_tpu.generate writes answers anew: leave replay and resume out")
    # Nothing is trained, so no group is too old, and none is dropped for it.
    pacing = {"stale_groups": "correct", "oversampling": 1.0}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=pacing)})
    check_names(config)
    directory, _ = choose_directory(config)
    interrupt_by_sigterm()
    inputs = read_inputs(config)
    with only_writer(directory), Placement(config, roles=("rollout",)) as placement:
        asyncio.run(_generate(config, inputs, placement, directory))


async def _generate(config: RunConfig, inputs: Inputs, placement: Placement, directory: RunDirectory) -> None:
    interrupt = Interrupt()
    async with AsyncExitStack() as stack:
        tracker = stack.enter_context(Tracker.open(config, directory.path, config.trainer.steps, 0))
        try:
            tracker.message(f"run directory {directory.path}; starting the engines ...")
            rewards = RewardService(config.reward)
            stack.callback(rewards.close)
            rewards.start()
            options = placement.engine_options(), placement.engine_chips()
            fleet = await interrupt.guard(Fleet.start(config, inputs.model_dir, directory.path, *options))
            stack.push_async_callback(fleet.close)
            stack.push_async_callback(inputs.environment.close)
            await interrupt.guard(inputs.environment.open())
            stream = open_stream(inputs.train, config.data, config.seed)
            answers = Answers(config, inputs.environment, fleet, rewards)
            collector = Collector(config, stream, answers)
            stack.push_async_callback(collector.close)
            await _all_steps(config, answers, collector, tracker, interrupt)
        except Interrupted as error:
            tracker.finish({"error": str(error)}, status="interrupted")
            raise


async def _all_steps(
    config: RunConfig, answers: Answers, collector: Collector, tracker: Tracker, interrupt: Interrupt
) -> None:
    for step in range(config.trainer.steps):
        collector.advance(step)
        with tracker.timer("step"), tracker.timer("generate"):
            groups = await interrupt.guard(collector.batch(step))
        if not groups:
            tracker.message(f"after step {step} the prompts are used up: data.epochs {config.data.epochs}")
            return
        tracker.samples(step, groups)
        tracker.log(step, rollout_metrics(groups) | collector.metrics | answers.metrics())
