"""The loop, readable from end to end: write answers, learn from them, carry the new policy to the engines."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError
from rl_tpu.orchestrator.answers import Answers
from rl_tpu.orchestrator.beside_training import BesideTraining
from rl_tpu.orchestrator.collector import Collector
from rl_tpu.orchestrator.evaluation import EvalSet, evaluate
from rl_tpu.orchestrator.experience import make_experience
from rl_tpu.orchestrator.interrupt import Interrupt
from rl_tpu.orchestrator.replay import Replay
from rl_tpu.orchestrator.state import Checkpoints
from rl_tpu.rollout.engine import EngineLostError
from rl_tpu.rollout.fleet import Evaluator, Fleet
from rl_tpu.tracking import Tracker, rollout_metrics
from rl_tpu.trainer import program_cache
from rl_tpu.trainer.group import TrainerGroup
from rl_tpu.types import Group


@dataclass
class Run:
    """The parts of a running job.

    ``step`` counts finished updates, which is also the version of the policy that the trainer holds: step s turns policy
    version s into version s + 1.
    """

    config: RunConfig
    trainer: TrainerGroup
    answers: Answers | None
    """Environment, engines and rewards; None where samples are replayed."""
    collector: Collector | Replay
    eval_sets: list[EvalSet]
    tracker: Tracker
    checkpoints: Checkpoints
    interrupt: Interrupt
    exports: Path
    """Where Hugging Face directories of the policy go."""
    step: int = 0
    saved_step: int = 0
    """Step of the newest checkpoint; 0 is the model the run started from."""
    evaluated_step: int = -1
    """Step after which the newest evaluation that has ended was made."""
    beside: BesideTraining = field(default_factory=BesideTraining)
    """The evaluation that goes on while the next steps are made."""


async def train(run: Run) -> None:
    """All steps that remain.

    Raises:
        Interrupted: a signal came; a checkpoint of the last whole step is written.
        RunError: a part failed; a checkpoint is written if the trainer holds a whole step and still answers.
    """
    config, timer = run.config, run.tracker.timer
    position: dict[str, Any] | None = run.collector.state()
    first = run.step
    try:
        await synchronise(run)
        if run.step == 0 or evaluation_due(run):
            await run.interrupt.guard(evaluation(run))
        run.collector.advance(run.step)

        while run.step < config.trainer.steps:
            step = run.step
            try:
                with timer("step"):
                    with timer("generate"):
                        groups = await run.interrupt.guard(run.collector.batch(step))
                    if not groups:
                        source = f"replay={config.replay}" if config.replay else f"data.epochs {config.data.epochs}"
                        run.tracker.message(f"after step {step} the prompts are used up: {source}")
                        break
                    await settle(run, wait=False)
                    metrics = batch_metrics(run, groups)
                    with timer("prepare"):
                        batches, prepared = await make_experience(groups, config, run.trainer)
                    if config.algorithm.minibatches * config.algorithm.epochs > 1:
                        position = None  # a policy that breaks off between two updates belongs to no step
                    with timer("train"):
                        # What both measure is there of the whole step.
                        metrics |= await run.trainer.learn(batches) | prepared
                    if step == first and (programs := program_cache.summary(config, metrics)):
                        run.tracker.message(programs)
                    run.step += 1
                    if due(run.step, config.algorithm.kl.refresh_steps):
                        await run.trainer.refresh_reference()
                    position = run.collector.state()
                    with timer("sync"):
                        metrics |= await synchronise(run)
                    run.collector.advance(run.step)
            finally:
                if run.step > step:  # it was learnt from and will be saved, whether or not the engines took it
                    run.tracker.samples(step, groups)
                    run.tracker.log(step, metrics)

            last = run.step == config.trainer.steps
            await settle_evaluation(run, wait=False)
            if last or evaluation_due(run):
                beside = config.evaluation.beside_training and not last
                await run.interrupt.guard(evaluation(run, beside=beside))
            if last or due(run.step, config.trainer.checkpoint.every_steps):
                await save(run, position)
            if due(run.step, config.trainer.checkpoint.export_every_steps):
                await run.trainer.export_hf(run.exports / f"step-{run.step:06d}")
            run.interrupt.check()
        if run.evaluated_step < run.step:  # the prompts were used up, or the last evaluation was interrupted
            await run.interrupt.guard(evaluation(run))
        await settle(run)
        if run.saved_step < run.step:
            await save(run, position)
            await settle(run)
    except Exception:
        await save_what_was_paid_for(run, position)
        raise
    finally:
        await run.beside.close()


async def synchronise(run: Run) -> dict[str, float]:
    """Carry the trainer's policy to every engine; on request compare what the engines then hold with the trainer.

    While the trainer publishes and the engines receive, they go on generating; each pauses only to load. Those that did
    not take the policy are sent the whole of it again.
    """
    if run.answers is None:
        return {}
    fleet, start = run.answers.fleet, time.perf_counter()
    async with fleet.syncing():
        handle, metrics = await run.trainer.publish(run.step)
        metrics |= await fleet.update_weights(handle, run.step)
        for _ in range(run.config.weight_sync.reload_attempts):
            if fleet.behind:
                handle, _ = await run.trainer.publish(run.step, whole=True)
                metrics |= await fleet.reload(handle, run.step)
    seconds = time.perf_counter() - start
    metrics |= {
        "sync/stage_s": metrics["sync/publish_s"] + metrics["sync/receive_s"],
        "sync/total_s": seconds,
        "sync/gb_per_s": metrics["sync/bytes"] / 1e9 / seconds,
    }
    if run.config.weight_sync.check_engine_weights:
        metrics["sync/checked_engines"] = await fleet.check_weights(await run.trainer.full_tensors())
    return metrics


async def evaluation(run: Run, *, beside: bool = False) -> None:
    """Score every evaluation set under the present policy and record the results. An evaluation that still goes on beside
    training is waited for.

    With ``beside`` and two engines that serve, this returns as soon as one of them is set aside for it.
    """
    if not run.eval_sets:
        return
    await settle_evaluation(run)
    if run.evaluated_step == run.step:
        return
    if beside:
        try:
            await run.beside.start(run.answers.fleet, partial(score_sets, run, run.step))
            return
        except RunError as error:
            run.tracker.message(f"training waits for the evaluation after step {run.step}: {error}")
    await score_sets(run, run.step, run.answers.fleet)


async def score_sets(run: Run, step: int, engines: Fleet | Evaluator) -> None:
    """Evaluate policy version ``step``, which the engines hold, and record the results."""
    with run.tracker.timer("evaluate"):
        environment, rewards = run.answers.environment, run.answers.rewards
        results = await evaluate(run.eval_sets, run.config, environment, engines, rewards)
    samples = [sample for result in results.values() for group in result.groups for sample in group.samples]
    if wrong := {span.version for sample in samples for span in sample.spans} - {step}:
        raise RunError(f"the evaluation of policy version {step} holds answers of version {min(wrong)}")
    run.tracker.evaluation(step, step, {name: result.metrics for name, result in results.items()})
    run.evaluated_step = step


async def settle_evaluation(run: Run, wait: bool = True) -> None:
    """Be done with an evaluation beside training if it has ended; with ``wait``, once it has."""
    try:
        await run.beside.settle(wait)
    except EngineLostError as error:
        run.tracker.message(f"an evaluation beside training lost its engine, the next policy is evaluated: {error}")


def evaluation_due(run: Run) -> bool:
    """Whether one is due after this step, or was due earlier and never ended: its engine was lost, or its run."""
    every = run.config.evaluation.every_steps
    if not every:
        return False
    newest = run.step - run.step % every
    return newest == run.step or (newest > run.evaluated_step and not run.beside.busy)


def batch_metrics(run: Run, groups: list[Group]) -> dict[str, float]:
    """What the policy wrote and how it was scored."""
    answers = run.answers.metrics() if run.answers else {}
    return rollout_metrics(groups, run.step) | run.collector.metrics | answers


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


async def save(run: Run, position: dict[str, Any]) -> None:
    """Write a checkpoint, or begin to (`trainer.checkpoint.mode`), once the one before is whole. ``position`` is the
    collector's state right after the last update."""
    state = {"collector": position, "evaluated_step": run.evaluated_step}
    with run.tracker.timer("checkpoint"):
        await settle(run)
        await run.checkpoints.begin(run.step, state, run.trainer.save)
        await settle(run, wait=False)


async def settle(run: Run, wait: bool = True) -> None:
    """Have the checkpoint that was begun, if one was, take its name when it is whole; with ``wait``, once it is.

    Raises RunError if it could not be written, or is not in time.
    """
    step = await run.checkpoints.settle(lambda: run.trainer.saved(wait))
    if step is not None:
        run.saved_step = step


async def save_what_was_paid_for(run: Run, position: dict[str, Any] | None) -> None:
    """A checkpoint on the way out of a broken or interrupted run, if the policy belongs to a whole step and the trainer is
    not what broke."""
    try:
        await settle(run)
    except (RunError, OSError) as error:
        run.tracker.message(f"an earlier checkpoint could not be saved: {error}")
    try:
        if position is not None and run.step > run.saved_step:
            await save(run, position)
            await settle(run)
    except (RunError, OSError) as error:
        run.tracker.message(f"step {run.step} could not be saved: {error}")
