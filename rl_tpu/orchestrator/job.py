"""A job from its configuration to its exit code: choose the run directory, start every part, train, close every part."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl_tpu.config.schema import RunConfig
from rl_tpu.data import open_stream
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.answers import Answers
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.dry_run import describe
from rl_tpu.orchestrator.inputs import Inputs, check_names, fill_options, read_inputs
from rl_tpu.orchestrator.interrupt import Interrupt, Interrupted, interrupt_by_sigterm
from rl_tpu.orchestrator.loop import Run, train
from rl_tpu.orchestrator.placement import ROLES, Placement, check_machine
from rl_tpu.orchestrator.replay import Replay, check_steps
from rl_tpu.orchestrator.state import Checkpoints, load_state
from rl_tpu.rewards import RewardService
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.sglang import vocabulary_size
from rl_tpu.tracking import RunDirectory, Tracker
from rl_tpu.trainer import program_cache
from rl_tpu.trainer.group import TrainerGroup
from weight_sync import remove_segments, remove_stale_segments


def run_job(config: RunConfig) -> None:
    """Train as `config` says (or, with dry_run, print what that would be).

    Raises:
        UserError: bad input; nothing was started.
        RunError: a part failed.
        Interrupted: SIGINT or SIGTERM.
    """
    check_names(config)
    directory, checkpoint = choose_directory(config)
    if config.dry_run:
        describe(config, directory.path)
        return
    steps = None
    if config.replay:  # no engine is started, so nothing can be evaluated
        steps = check_steps(config, directory.path)
        evaluation = config.evaluation.model_copy(update={"sets": {}})
        config = config.model_copy(update={"evaluation": evaluation})
    roles = ("trainer",) if config.replay else ROLES
    check_machine(config, roles)
    program_cache.check_writable(config)
    interrupt_by_sigterm()
    inputs = read_inputs(config, training=not config.replay)
    state = load_state(checkpoint, inputs.train_prompts) if checkpoint else None
    if state:
        check_pacing(config, state)
    with only_writer(directory), Placement(config, roles=roles) as placement:
        asyncio.run(_run(config, inputs, placement, directory, checkpoint, state, steps))


def exit_code(job: Callable[[], None]) -> int:
    """Run a job; print one line about what ended it. 0 done, 1 a part failed, 2 bad input, 128 + signal if interrupted."""
    try:
        job()
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"the run failed: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(str(error), file=sys.stderr)
        return 128 + error.signal
    except KeyboardInterrupt:
        print("interrupted before the run had started", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        traceback.print_exc()
        print(f"the run failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def choose_directory(config: RunConfig) -> tuple[RunDirectory, Path | None]:
    """The run directory, and the checkpoint to continue from if there is one.

    Raises:
        UserError: the directory holds a run and `resume` is `never`, or the named checkpoint does not exist.
    """
    runs = Path("runs") / config.name
    given = Path(config.run_dir).expanduser() if config.run_dir else None
    if config.resume not in ("never", "auto"):
        checkpoint = Path(config.resume).expanduser().resolve()
        if not (checkpoint / "state.json").is_file():
            raise UserError(f"resume={config.resume!r} is no checkpoint directory (it has no state.json)")
        return RunDirectory(given.resolve() if given else checkpoint.parents[1]), checkpoint
    if config.resume == "auto" and given is None:
        with_checkpoints = [path.parents[2] for path in runs.glob("*/checkpoints/step-*/state.json")]
        given = max(with_checkpoints, key=lambda path: path.name, default=None)
    directory = RunDirectory((given or runs / time.strftime("%Y%m%d-%H%M%S")).resolve())
    if config.resume == "auto":
        return directory, Checkpoints(directory.checkpoints, config.trainer.checkpoint.keep).newest()
    if directory.holds_a_run and not config.dry_run:
        raise UserError(
            f"run_dir {directory.path} already holds a run: choose another run_dir, or continue the run with resume=auto"
        )
    return directory, None


@contextmanager
def only_writer(directory: RunDirectory) -> Iterator[None]:
    """Hold the run directory. Raises UserError while another process does."""
    directory.create()
    lock = FileLock(directory.path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is writing into run_dir {directory.path}: wait for it or stop it") from None
    with lock:
        yield


def check_pacing(config: RunConfig, state: dict[str, Any]) -> None:
    """Raise UserError where a checkpoint's groups do not fit the bound on staleness as it is configured now."""
    step, consumed, rollout = state["step"], state["collector"]["consumed"], config.rollout
    if not (config.replay or state["collector"]["stream"]):
        raise UserError("resume: the checkpoint is of a replay, which drew no prompts: go on with replay=RUN_DIR")
    if consumed != step * rollout.prompts_per_step:
        raise UserError(
            f"resume: the checkpoint drew {consumed} prompts in {step} steps, with rollout.prompts_per_step"
            f" {rollout.prompts_per_step} it would be {step * rollout.prompts_per_step}: resume with the same number"
        )
    samples = [sample for group in state["collector"]["ready"] for sample in group.samples]
    lag = max((step - sample.oldest_version for sample in samples), default=0)
    if lag > rollout.max_staleness and rollout.stale_groups == "wait":
        raise UserError(
            f"resume: the checkpoint holds groups {lag} policy versions old, rollout.max_staleness is"
            f" {rollout.max_staleness}: resume with {lag} or more, or with rollout.stale_groups=drop"
        )


async def _run(
    config: RunConfig,
    inputs: Inputs,
    placement: Placement,
    directory: RunDirectory,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    steps: list[Path] | None,
) -> None:
    run_id = uuid.uuid4().hex[:8]
    interrupt = Interrupt()
    step = state["step"] if state else 0
    remove_stale_segments()
    async with AsyncExitStack() as stack:
        stack.callback(remove_segments, run_id)
        tracker = stack.enter_context(Tracker.open(config, directory.path, config.trainer.steps, step))
        try:
            for place, prompts in inputs.found.items():
                tracker.message(f"{place}: {prompts}")
            parts = "the trainer" if config.replay else "the trainer and the engines"
            tracker.message(f"run directory {directory.path}; starting {parts} ...")
            rewards = RewardService(config.reward)
            stack.callback(rewards.close)
            if not config.replay:
                rewards.start()
            trainer, fleet = await interrupt.guard(_start(stack, config, inputs, placement, directory, run_id))
            if checkpoint:
                await interrupt.guard(trainer.load(checkpoint / "trainer"))
                tracker.message(f"continuing after step {step} from {checkpoint}")
            answers = None
            if fleet:
                stack.push_async_callback(inputs.environment.close)
                await interrupt.guard(inputs.environment.open())
                answers = Answers(config, inputs.environment, fleet, rewards)
                source = Collector(config, open_stream(inputs.train, config.data, config.seed), answers)
            else:
                source = Replay(config, steps, vocabulary_size(inputs.model_dir))
            run = Run(
                config=config,
                trainer=trainer,
                answers=answers,
                collector=source,
                eval_sets=inputs.eval_sets,
                tracker=tracker,
                checkpoints=Checkpoints(directory.checkpoints, config.trainer.checkpoint.keep),
                interrupt=interrupt,
                exports=directory.exports,
            )
            if state:
                run.step = run.saved_step = step
                run.evaluated_step = state.get("evaluated_step", -1)
                run.collector.restore(state["collector"])
            stack.push_async_callback(run.collector.close)
            await train(run)
            if config.trainer.checkpoint.export_final:
                await trainer.export_hf(directory.final)
        except Interrupted as error:
            if (newest := Checkpoints(directory.checkpoints, 1).newest()) is not None:
                tracker.message(f"saved {newest}; continue with run_dir={directory.path} resume=auto")
            tracker.finish({"error": str(error)}, status="interrupted")
            raise
        tracker.finish()


async def _start(
    stack: AsyncExitStack,
    config: RunConfig,
    inputs: Inputs,
    placement: Placement,
    directory: RunDirectory,
    run_id: str,
) -> tuple[TrainerGroup, Fleet | None]:
    """Trainer ranks and engines, started side by side; no engines where samples are replayed."""
    model_dir, run_dir = inputs.model_dir, directory.path
    config = fill_options(config, run_dir=run_dir, model_dir=model_dir)
    trainer = TrainerGroup.start(config, model_dir, run_dir, run_id, placement.trainer_options())
    starts = [asyncio.create_task(trainer)]
    if not config.replay:
        fleet = Fleet.start(config, model_dir, run_dir, placement.engine_options(), placement.engine_chips())
        starts.append(asyncio.create_task(fleet))
    try:
        await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failed = [start for start in starts if start.done() and not start.cancelled() and start.exception()]
        for start in starts:
            start.cancel()  # where one part cannot start, nobody waits for the other
        for part in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(part, BaseException):
                stack.push_async_callback(part.close)
    trainer, *fleet = [start.result() for start in failed or starts]
    return trainer, fleet[0] if fleet else None
