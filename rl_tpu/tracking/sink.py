"""What a place that records a run is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tpu.types import Group

if TYPE_CHECKING:
    from rl_tpu.tracking.timing import Span

Metrics = dict[str, float]


class Sink:
    """One destination. A subclass overrides what it cares for; whatever it raises switches it off, not the run."""

    name: str

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step, once per step, in order."""

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        """Results of every evaluation set under policy ``version``."""

    def samples(self, step: int, groups: list[Group]) -> None:
        """What the policy wrote for one step, rewards and advantages included."""

    def spans(self, step: int, spans: list[Span]) -> None:
        """The parts of one step in time."""

    def message(self, text: Any) -> None:
        """Something for the reader: a string or anything rich can print."""

    def part_started(self, part: str) -> None:
        """The run has begun this part of a step."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is over, well or badly."""

    def close(self) -> None:
        """Let go of files and processes; also called after a failure."""


def evaluation_metrics(results: dict[str, Metrics]) -> Metrics:
    """``eval/SET/METRIC`` of every evaluation set."""
    return {f"eval/{name}/{metric}": value for name, metrics in results.items() for metric, value in metrics.items()}
