"""Where the seconds of a step go, as metrics and as a timeline that Perfetto opens."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_tpu.tracking.sink import Sink

PARTS = ("generate", "prepare", "train", "sync")
"""The parts that a step consists of."""


@dataclass(frozen=True)
class Span:
    """``part`` ran from ``start`` for ``seconds``; start is in seconds since the epoch."""

    part: str
    start: float
    seconds: float


class Timer:
    """Collects spans: ``with timer("generate"): ...``. Any thread may time; parts may nest and overlap.

    Seconds of equal parts add up, so parts that overlap (asynchronous generation) may sum to more than the step.
    Wrap the whole step in ``timer("step")`` to have its length too.
    """

    def __init__(self, on_start: Callable[[str], None] = lambda part: None) -> None:
        self.totals: dict[str, float] = {}
        """Seconds per part since this timer began."""
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._on_start = on_start

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._on_start(part)
        start, began = time.time(), time.perf_counter()
        try:
            yield
        finally:
            span = Span(part, start, time.perf_counter() - began)
            with self._lock:
                self._spans.append(span)
                self.totals[part] = self.totals.get(part, 0.0) + span.seconds

    def lap(self) -> list[Span]:
        """The spans that ended since the last lap."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


def span_metrics(spans: list[Span]) -> dict[str, float]:
    """``perf/PART_s``: seconds of each part."""
    seconds: dict[str, float] = {}
    for span in spans:
        name = f"perf/{span.part}_s"
        seconds[name] = seconds.get(name, 0.0) + span.seconds
    return seconds


def part_seconds(row: dict[str, Any]) -> dict[str, float]:
    """Part -> seconds, read back from a row of metrics."""
    names = {name: match[1] for name in row if (match := re.fullmatch(r"perf/(\w+)(?<!_per)_s", name))}
    return {part: row[name] for name, part in names.items() if row[name] is not None}


class TimelineSink(Sink):
    """Writes spans as Chrome trace events (JSON array format), one track per part.

    The format lets the closing bracket be missing, so the file opens while the run goes and after it was killed.
    """

    name = "timeline"
    _END = '{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "driver"}}]\n'

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracks: dict[str, int] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].removesuffix(self._END)  # a killed writer leaves half a line
        path.write_text(whole_lines or "[\n", encoding="utf-8")

    def spans(self, step: int, spans: list[Span]) -> None:
        events = []
        for span in spans:
            if span.part not in self._tracks:
                self._tracks[span.part] = len(self._tracks) + 1
                events.append(self._event("thread_name", "M", span.part, args={"name": span.part}))
                events.append(
                    self._event("thread_sort_index", "M", span.part, args={"sort_index": self._tracks[span.part]})
                )
            times = {"ts": round(span.start * 1e6), "dur": round(span.seconds * 1e6)}
            events.append(self._event(span.part, "X", span.part, **times, args={"step": step}))
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + ",\n" for event in events)

    def close(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(self._END)

    def _event(self, name: str, phase: str, part: str, **fields: object) -> dict[str, object]:
        return {"name": name, "ph": phase, "pid": 1, "tid": self._tracks[part], **fields}
