"""Where everything a run leaves behind lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """The layout of a run directory.

    ==========================  ====================================================================================
    ``config.yaml``             the resolved configuration of the (latest start of the) run
    ``metrics.jsonl``           one row per step, strict JSON: ``step`` and every metric; appended while the run goes
    ``evaluations.jsonl``       one row per evaluation: ``step``, ``version``, ``eval/SET/METRIC``
    ``samples/step-000012.jsonl``  every sample of step 12: prompt, answer, ids, rewards, versions, log-probabilities
    ``curves.png``              the curves, redrawn at every evaluation and at the end
    ``summary.json``            how the run ended: status, before and after, final metrics, seconds, package versions
    ``timeline.json``           the parts of every step in time; open it in https://ui.perfetto.dev
    ``checkpoints/``            what a run resumes from
    ``exports/``                the policy as Hugging Face directories, if ``trainer.checkpoint.export_every_steps``
    ``final/``                  the final policy as a Hugging Face directory
    ``logs/``                   output of engines, trainer ranks and other processes
    ``tensorboard/``            event files, if ``tracking.tensorboard``
    ``wandb/``                  Weights & Biases files, if ``tracking.wandb.mode`` is not ``disabled``
    ==========================  ====================================================================================

    Steps count from 0. The row of step s is the update that trained on the samples of step s; an evaluation at step s
    came before that update, so 0 is before training and the number of steps is after it.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def step_samples(self, step: int) -> Path:
        return self.samples / f"step-{step:06d}.jsonl"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def holds_a_run(self) -> bool:
        """Whether a run has been here: something would be overwritten by another one."""
        return any(path.exists() for path in (self.metrics, self.summary, self.checkpoints))

    def create(self) -> RunDirectory:
        """Make the directory and the folders that other processes write to."""
        for folder in (self.path, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self
