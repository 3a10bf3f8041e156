"""Metrics to Weights & Biases, with an account or into a folder."""

from __future__ import annotations

import os
import secrets
import threading
from typing import Any

import psutil

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.sink import Metrics, Sink, evaluation_metrics

START_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 60.0
SERVICE_TIMEOUT_S = 15.0
"""What wandb's service process gets beyond that to answer."""


class WandbSink(Sink):
    """One wandb run per run directory: its id is kept in ``wandb/run_id``, and a resumed run continues it.

    The x axis is the metric ``step``: wandb's own counter cannot go back to a checkpoint's step. Offline runs need
    neither account nor network; upload them later with ``wandb sync RUN_DIR/wandb/offline-run-*``.

    Raises UserError for mode ``online`` without credentials.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        mode = config.tracking.wandb.mode
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports go over the network
        import wandb  # half a second of imports

        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise UserError("tracking.wandb.mode=online: no credentials; set WANDB_API_KEY or use mode=offline")
        directory.wandb.mkdir(exist_ok=True)
        id_file = directory.wandb / "run_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=config.tracking.wandb.project,
            name=config.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(directory.path),
            mode=mode,
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",  # it would take over stdout, which the progress bar owns
                silent=True,
                init_timeout=START_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        self.log(step, evaluation_metrics(results))

    def finish(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({"status": summary["status"]})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            _finish(run)


def _finish(run: Any) -> None:
    """End the run. wandb bounds the upload, but waits for its own service process, here and at exit, without a deadline."""
    failures: list[Exception] = []

    def finish() -> None:
        try:
            run.finish()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=finish, name="wandb finish", daemon=True)
    thread.start()
    thread.join(FINISH_TIMEOUT_S + SERVICE_TIMEOUT_S)
    if thread.is_alive():
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("wandb-"):
                process.kill()
        raise TimeoutError("its service does not answer and was ended; upload later with wandb sync")
    if failures:
        raise failures[0]
