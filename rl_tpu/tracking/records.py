"""The record a run cannot do without: metrics.jsonl and evaluations.jsonl."""

from __future__ import annotations

import math
from typing import Any

from rl_tpu.errors import RunError
from rl_tpu.tracking.json_files import append_line, read_rows, write_rows
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.sink import Metrics, evaluation_metrics


class Records:
    """One row per step and one per evaluation, appended and flushed as they come.

    Opened at ``start_step`` of a resumed run it drops what the earlier process recorded beyond that: rows of steps
    >= start_step and evaluations of steps > start_step. An evaluation of a step that has one replaces it.

    Raises RunError when a file cannot be written, UserError when one that is there cannot be read.
    """

    def __init__(self, directory: RunDirectory, start_step: int) -> None:
        self._directory = directory
        self.rows = [row for row in read_rows(directory.metrics) if row["step"] < start_step]
        self.evaluations = [row for row in read_rows(directory.evaluations) if row["step"] <= start_step]
        self._write(write_rows, directory.metrics, self.rows)
        self._write(write_rows, directory.evaluations, self.evaluations)

    def log(self, step: int, metrics: Metrics) -> None:
        if self.rows and step <= self.rows[-1]["step"]:
            raise ValueError(f"step {step} was logged after step {self.rows[-1]['step']}")
        row = {"step": step, **metrics}
        # JSON has no NaN; null alone would hide whether a value was NaN or infinite, which is what one debugs with.
        if non_finite := {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}:
            row["non_finite"] = non_finite
        self._write(append_line, self._directory.metrics, row)
        self.rows.append(row)

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        row = {"step": step, "version": version, **evaluation_metrics(results)}
        self.evaluations = [other for other in self.evaluations if other["step"] != step] + [row]
        self._write(write_rows, self._directory.evaluations, self.evaluations)

    def _write(self, write: Any, path: Any, value: Any) -> None:
        try:
            write(path, value)
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"tracking: cannot write {path} ({reason}); the run would leave no record") from error
