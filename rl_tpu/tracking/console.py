"""What the reader sees while a run goes: one line per step, and on a terminal a bar below it."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rl_tpu.tracking.evaluation_names import headline
from rl_tpu.tracking.sink import Metrics, Sink
from rl_tpu.tracking.timing import PARTS, part_seconds

FIELDS = {
    "reward/mean": "reward",
    "rollout/response_tokens_mean": "length",
    "train/loss": "loss",
    "train/grad_norm": "grad norm",
    "train/logprob_diff_mean": "logprob diff",
}
"""Metrics of the step line and what they are called there."""
WIDTH_OF_A_LOG = 140
"""Columns for tables when the output is no terminal."""


class ConsoleSink(Sink):
    """On a terminal a live bar with the part that runs now; into a file or pipe plain lines only.

    While the bar is up everything that is printed or logged goes above it.
    """

    name = "console"

    def __init__(self, total_steps: int, start_step: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_OF_A_LOG
        self._total, self._start_step, self._began = total_steps, start_step, time.monotonic()
        self._stepping = False
        self._bar: Progress | None = None
        self._moved_handlers: list[tuple[logging.StreamHandler, Any]] = []
        if self.console.is_interactive:
            self._show_bar(start_step)

    def _show_bar(self, done: int) -> None:
        columns = (
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        before = {id(stream): name for name in ("stdout", "stderr") if (stream := getattr(sys, name))}
        self._bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._task = self._bar.add_task("starting", total=self._total, completed=done, eta="")
        self._bar.start()
        # The bar redirects sys.stdout and sys.stderr; log handlers made earlier still hold the streams themselves.
        for handler in _stream_handlers():
            if name := before.get(id(handler.stream)):
                self._moved_handlers.append((handler, handler.setStream(getattr(sys, name))))

    def log(self, step: int, metrics: Metrics) -> None:
        done = step + 1
        seconds_per_step = (time.monotonic() - self._began) / max(1, done - self._start_step)
        eta = f"ETA {timedelta(seconds=round(seconds_per_step * (self._total - done)))}" if done < self._total else ""
        self.message(step_line(step, self._total, metrics) + ("" if self._bar or not eta else f"  {eta}"))
        if self._bar:
            self._bar.update(self._task, completed=done, eta=eta)

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        sets = []
        for name, metrics in results.items():
            sets.append(f"{name}: " + ", ".join(f"{metric} {number(metrics[metric])}" for metric in headline(metrics)))
        self.message(f"evaluation at step {step} (policy version {version})  " + "; ".join(sets))

    def message(self, text: Any) -> None:
        # A log's lines stay whole, however long; a terminal wraps them.
        self.console.print(text, markup=False, soft_wrap=isinstance(text, str) and not self._bar)

    def part_started(self, part: str) -> None:
        if not self._stepping and part == "step":  # starting engines and ranks says nothing about the steps to come
            self._stepping, self._began = True, time.monotonic()
        if self._bar and part != "step":
            self._bar.update(self._task, description=part)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
        for handler, stream in self._moved_handlers:
            handler.setStream(stream)
        self._moved_handlers = []


def step_line(step: int, total: int, metrics: Metrics) -> str:
    """``[12/20] step 11  reward 0.812  ...``: the numbers that tell whether a run is well, those that are there."""
    words = [f"[{step + 1}/{total}] step {step}"]
    words += [f"{label} {number(metrics[name])}" for name, label in FIELDS.items() if name in metrics]
    seconds = part_seconds(metrics)
    if "step" in seconds:
        parts = ", ".join(f"{part} {number(seconds[part])}" for part in PARTS if part in seconds)
        words.append(f"{number(seconds['step'])} s" + (f" ({parts})" if parts else ""))
    if "perf/tokens_per_s" in metrics:
        words.append(f"{number(metrics['perf/tokens_per_s'])} tokens/s")
    return "  ".join(words)


def number(value: float) -> str:
    """Three significant digits, whole numbers whole: 0.0123, 1.2e-05, 143, 12041."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
