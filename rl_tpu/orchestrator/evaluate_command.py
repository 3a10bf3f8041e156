"""The command line of evaluation: the settings of a training run, with `checkpoint` in place of its model, and `compare`.

Only engines are started.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rl_tpu.config.compose import compose_config, validate
from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.comparison import Report, check_comparable, compare
from rl_tpu.orchestrator.evaluation import EvalResult, evaluate
from rl_tpu.orchestrator.evaluation_report import (
    FILE,
    comparable_settings,
    comparison_table,
    evaluation_report,
    evaluation_table,
    read_report,
    write_report,
    write_samples,
)
from rl_tpu.orchestrator.inputs import Inputs, check_names, read_inputs
from rl_tpu.orchestrator.interrupt import Interrupt, interrupt_by_sigterm
from rl_tpu.orchestrator.job import exit_code
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.orchestrator.policy_directory import find_policy
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.tracking import RunDirectory
from rl_tpu.tracking.console import WIDTH_OF_A_LOG


@dataclass
class Evaluation:
    """One policy to evaluate, ready to start."""

    config: RunConfig
    inputs: Inputs
    settings: dict[str, dict]
    directory: Path
    """Where its report goes."""

    @classmethod
    def read(cls, config: RunConfig, directory: Path) -> Evaluation:
        inputs = read_inputs(config, training=False)
        return cls(config, inputs, comparable_settings(config, inputs.eval_sets), directory)


def evaluate_checkpoint() -> None:
    """Exit codes as in training."""
    sys.exit(exit_code(lambda: run_evaluation(sys.argv[1:])))


def run_evaluation(arguments: list[str]) -> None:
    """Score every evaluation set under `checkpoint`, and under `compare` if it is given; print tables and write
    evaluation.json into the run directory. Raises as a training job does."""
    config, other = configurations(arguments)
    check_names(config)
    interrupt_by_sigterm()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = Path(config.run_dir or Path("runs") / config.name / f"evaluation-{stamp}").expanduser().resolve()
    if RunDirectory(directory).holds_a_run or (directory / FILE).exists():
        raise UserError(f"run_dir {directory} already holds a run or an evaluation: choose another run_dir")
    first = Evaluation.read(config, directory)
    second: Evaluation | Report | None = None
    if isinstance(other, Path):
        second = read_report(other)
        check_comparable(first.settings, second["settings"], str(other))
    elif other is not None:
        second = Evaluation.read(other, directory / "compared")
        check_comparable(first.settings, second.settings, other.model.path)
    with Placement(config, roles=("rollout",)) as placement:
        evaluations = [each for each in (first, second) if isinstance(each, Evaluation)]
        report, *rest = asyncio.run(_evaluate_all(evaluations, placement))
    _show(report, rest[0] if rest else second, config, directory)


def configurations(arguments: list[str]) -> tuple[RunConfig, RunConfig | Path | None]:
    """Of the checkpoint, and of what it is compared with: another model, or an earlier evaluation.json."""
    given: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"command line: {argument!r} is not KEY=VALUE")
        if name not in ("checkpoint", "compare"):
            overrides.append(argument)
        elif name in given:
            raise UserError(f"command line: {name} is given twice")
        else:
            given[name] = value
    config = validate(compose_config(overrides))
    if not config.evaluation.sets:
        raise UserError("nothing to evaluate: evaluation.sets is empty (choose evaluation=NAME or an experiment)")
    if "checkpoint" in given:
        config = _with_model(config, find_policy(given["checkpoint"], "checkpoint"))
    if "compare" not in given:
        return config, None
    report = Path(given["compare"]).expanduser().resolve()
    if report.suffix == ".json" or (report / FILE).is_file():
        return config, report if report.suffix == ".json" else report / FILE
    return config, _with_model(config, find_policy(given["compare"], "compare"))


def _with_model(config: RunConfig, path: Path) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path), "make": None})})


async def _evaluate_all(evaluations: list[Evaluation], placement: Placement) -> list[Report]:
    """One after the other: each has all the engines. What is done is written at once."""
    interrupt, reports = Interrupt(), []
    for chosen in evaluations:
        RunDirectory(chosen.directory).create()
        results = await _evaluate(chosen, placement, interrupt)
        reports.append(evaluation_report(chosen.inputs.model_dir, chosen.settings, results))
        write_samples(chosen.directory, results)
        write_report(chosen.directory, reports[-1])
    return reports


async def _evaluate(chosen: Evaluation, placement: Placement, interrupt: Interrupt) -> dict[str, EvalResult]:
    config, inputs = chosen.config, chosen.inputs
    async with AsyncExitStack() as stack:
        rewards = RewardService(config.reward)
        stack.callback(rewards.close)
        options = placement.engine_options(), placement.engine_chips()
        fleet = await interrupt.guard(Fleet.start(config, inputs.model_dir, chosen.directory, *options))
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(inputs.environment.close)
        await interrupt.guard(inputs.environment.open())
        on_progress = stack.enter_context(_progress(chosen))
        work = evaluate(inputs.eval_sets, config, inputs.environment, fleet, rewards, on_progress)
        return await interrupt.guard(work)


@contextmanager
def _progress(chosen: Evaluation) -> Iterator:
    total = sum(len(each.prompts) for each in chosen.inputs.eval_sets)
    with Progress(transient=True) as progress:
        bar = progress.add_task(f"evaluating {chosen.inputs.model_dir.name}", total=total)
        yield lambda done: progress.advance(bar, done)


def _show(report: Report, other: Report | None, config: RunConfig, directory: Path) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_LOG
    console.print(evaluation_table(report["evaluation"]))
    if other is not None:
        compared = compare(report, other, config.evaluation.confidence)
        write_report(directory, report | {"comparison": {"with": other["model"], "sets": compared}})
        console.print(comparison_table(compared))
        for name, each in compared.items():
            console.print(f"{name}: {each['verdict']}", markup=False, soft_wrap=True)
    console.print(f"written to {directory / FILE}", soft_wrap=True)
