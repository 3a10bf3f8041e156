"""The one object that the loop tells what happens."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.tracking.console import ConsoleSink
from rl_tpu.tracking.curves import CurvesSink
from rl_tpu.tracking.json_files import to_json, write_atomically
from rl_tpu.tracking.records import Records
from rl_tpu.tracking.report import before_after_table, compare_evaluations, run_totals
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.sample_dump import SampleDump
from rl_tpu.tracking.sink import Metrics, Sink
from rl_tpu.tracking.tensorboard import TensorBoardSink
from rl_tpu.tracking.timing import TimelineSink, Timer, part_seconds, span_metrics
from rl_tpu.tracking.versions import package_versions
from rl_tpu.tracking.wandb import WandbSink
from rl_tpu.types import Group

logger = logging.getLogger("rl_tpu.tracking")


class Tracker:
    """Records a run in its run directory (see RunDirectory), on the console, in TensorBoard and in wandb.

    A destination that fails is switched off with one warning; only metrics.jsonl, evaluations.jsonl and summary.json
    are worth a RunError. Use it as a context manager: however the block ends, everything is flushed and summary.json
    says how.

        with Tracker.open(config, run_dir, total_steps) as tracker:
            for step in range(total_steps):
                with tracker.timer("step"):
                    with tracker.timer("generate"): ...
                tracker.log(step, metrics)
            tracker.finish({"final_policy": "final"})
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, total_steps: int, start_step: int) -> None:
        self.directory = directory
        self.timer = Timer(on_start=lambda part: self._tell("part_started", part))
        self._config = config
        self._sinks: list[Sink] = []
        self._closed = False
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._records = Records(directory, start_step)
        self._earlier_seconds = Counter()
        for row in self._records.rows:
            self._earlier_seconds.update(part_seconds(row))
        self._add("console", lambda: ConsoleSink(total_steps, start_step))
        self._add("timeline", lambda: TimelineSink(directory.timeline))
        if config.tracking.samples:
            self._add("sample dump", lambda: SampleDump(directory, start_step))
        if config.tracking.tensorboard:
            self._add("TensorBoard", lambda: TensorBoardSink(directory.tensorboard, start_step))
        if config.tracking.wandb.mode != "disabled":
            self._add("wandb", lambda: WandbSink(config, directory))
        self._add("curves", lambda: CurvesSink(directory, config.tracking.plot_metrics))

    @classmethod
    def open(cls, config: RunConfig, run_dir: Path, total_steps: int, start_step: int = 0) -> Tracker:
        """Start recording, at the first step that this process will log: 0, or where a checkpoint resumes.

        Of an earlier process in the same directory the rows, samples and evaluations beyond ``start_step`` are dropped.
        Raises UserError for settings that cannot work, RunError if the directory cannot be written.
        """
        directory = RunDirectory(Path(run_dir))
        try:
            directory.create()
            write_atomically(directory.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        except OSError as error:
            raise RunError(f"tracking: cannot write into {directory.path} ({error.strerror})") from error
        return cls(config, directory, total_steps, start_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """The one row of ``step``. The timer's seconds since the last row come with it as ``perf/PART_s``, and
        ``perf/tokens_per_s`` if the step's length and ``rollout/total_tokens`` are known."""
        spans = self.timer.lap()
        row = span_metrics(spans) | {name: _number(value) for name, value in metrics.items()}
        if row.get("perf/step_s") and "rollout/total_tokens" in row:
            row.setdefault("perf/tokens_per_s", row["rollout/total_tokens"] / row["perf/step_s"])
        self._records.log(step, row)
        self._tell("spans", step, spans)
        self._tell("log", step, row)

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        """Results of all evaluation sets under policy ``version``, before the update of ``step``."""
        results = {name: {metric: _number(v) for metric, v in metrics.items()} for name, metrics in results.items()}
        self._records.evaluation(step, version, results)
        self._tell("evaluation", step, version, results)

    def samples(self, step: int, groups: list[Group]) -> None:
        """Dump what the policy wrote for ``step``, when rewards and advantages are in it."""
        self._tell("samples", step, groups)

    def message(self, text: Any) -> None:
        """Show the reader a line (or anything rich prints) without disturbing the progress bar."""
        self._tell("message", text)

    def finish(self, summary: dict[str, Any] | None = None, status: str = "finished") -> dict[str, Any]:
        """End the record: summary.json, last curves, the table of before and after. Further calls do nothing.

        ``summary`` adds to, and wins over, what the tracker knows itself. Returns what summary.json holds.
        """
        if self._closed:
            return {}
        self._closed = True
        full = self._summary(status) | (summary or {})
        self._tell("spans", full["steps"], self.timer.lap())
        try:
            write_atomically(self.directory.summary, to_json(full, indent=2) + "\n")
        except OSError as error:
            raise RunError(f"tracking: cannot write {self.directory.summary} ({error.strerror})") from error
        finally:
            self._tell("finish", full)
            self._say_goodbye(full)
            self._tell("close")
        return full

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.finish()
            return
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            self.finish({"error": f"{kind.__name__}: {error}"}, "interrupted" if interrupted else "failed")
        except RunError as second:  # must not hide why the run ended
            logger.warning("%s", second)

    def _summary(self, status: str) -> dict[str, Any]:
        rows, seconds = self._records.rows, Counter(self._earlier_seconds)
        seconds.update(self.timer.totals)
        return {
            "name": self._config.name,
            "status": status,
            "steps": rows[-1]["step"] + 1 if rows else 0,
            "started": self._started,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "evaluation": compare_evaluations(self._records.evaluations),
            "final_metrics": {name: value for name, value in rows[-1].items() if name != "step"} if rows else {},
            **run_totals(rows),
            "seconds": dict(seconds),
            "versions": package_versions(),
        }

    def _say_goodbye(self, summary: dict[str, Any]) -> None:
        if summary["evaluation"]:
            self.message(before_after_table(summary["evaluation"]))
        if self.directory.curves.exists():
            self.message(f"curves: {self.directory.curves}")
        self.message(f"{summary['status']} after {summary['steps']} steps; everything is in {self.directory.path}")

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks.append(make())
        except UserError:
            self._tell("close")
            raise
        except Exception as error:
            _warn(name, error)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call every sink; one that raises is closed, dropped and warned about."""
        for sink in list(self._sinks):
            try:
                getattr(sink, event)(*arguments)
            except Exception as error:
                self._sinks.remove(sink)
                try:
                    sink.close()
                except Exception:
                    logger.debug("closing %s", sink.name, exc_info=True)
                _warn(sink.name, error)


def _warn(name: str, error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    logger.warning("tracking: %s is switched off for the rest of the run (%s)", name, reason)


def _number(value: Any) -> float:
    """A Python number from whatever holds one: int, bool, float, a numpy or torch scalar."""
    return value if type(value) in (int, float) else float(value)
