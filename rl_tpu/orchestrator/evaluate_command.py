"""The command line of evaluation: the settings of a training run, with `checkpoint` in place of its model.

Only engines are started.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rl_tpu.config.compose import compose_config, validate
from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.evaluation import EvalResult, evaluate
from rl_tpu.orchestrator.inputs import Inputs, check_names, read_inputs
from rl_tpu.orchestrator.interrupt import Interrupt, interrupt_by_sigterm
from rl_tpu.orchestrator.job import exit_code
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.tracking import RunDirectory


def evaluate_checkpoint() -> None:
    """Exit codes as in training."""
    sys.exit(exit_code(lambda: run_evaluation(configuration(sys.argv[1:]))))


def configuration(arguments: list[str]) -> RunConfig:
    """The command line's run configuration, with `checkpoint=PATH` as its model."""
    overrides = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"command line: {argument!r} is not KEY=VALUE")
        overrides += [f"model.path={value}", "model.make=null"] if name == "checkpoint" else [argument]
    config = validate(compose_config(overrides))
    if not config.evaluation.sets:
        raise UserError("nothing to evaluate: evaluation.sets is empty (choose evaluation=NAME or an experiment)")
    return config


def run_evaluation(config: RunConfig) -> None:
    """Score every evaluation set, print a table and write evaluation.json into the run directory."""
    check_names(config)
    interrupt_by_sigterm()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = Path(config.run_dir or Path("runs") / config.name / f"evaluation-{stamp}").resolve()
    inputs = read_inputs(config, training=False)
    RunDirectory(directory).create()
    with Placement(config, roles=("rollout",)) as placement:
        results = asyncio.run(_evaluate(config, inputs, placement, directory))
    report = {"model": str(inputs.model_dir), "evaluation": {name: result.metrics for name, result in results.items()}}
    (directory / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    console = Console(highlight=False)
    console.print(_table(results))
    console.print(f"written to {directory / 'evaluation.json'}", soft_wrap=True)


async def _evaluate(config: RunConfig, inputs: Inputs, placement: Placement, directory: Path) -> dict[str, EvalResult]:
    interrupt = Interrupt()
    total = sum(len(chosen.prompts) for chosen in inputs.eval_sets)
    async with AsyncExitStack() as stack:
        rewards = RewardService(config.reward)
        stack.callback(rewards.close)
        start = Fleet.start(config, inputs.model_dir, directory, placement.engine_options(), placement.engine_chips())
        fleet = await interrupt.guard(start)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(inputs.environment.close)
        await interrupt.guard(inputs.environment.open())
        with Progress(transient=True) as progress:
            bar = progress.add_task("evaluating", total=total)
            work = evaluate(
                inputs.eval_sets, config, inputs.environment, fleet, rewards, lambda done: progress.advance(bar, done)
            )
            return await interrupt.guard(work)


def _table(results: dict[str, EvalResult]) -> Table:
    table = Table("set", "metric", title="Evaluation", title_justify="left")
    table.add_column("value", justify="right")
    for name, result in results.items():
        table.add_section()
        for metric, value in result.metrics.items():
            table.add_row(name, metric, f"{value:.4g}")
    return table
