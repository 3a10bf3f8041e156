"""Other ways to move weights, given as a Python file and measured as the transports are: one process to one other.

The file (or module) has a function ``baselines(payload)`` that returns functions by name, each of which opens one way
for a dict of private tensors. It is called in a process of its own.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from weight_sync.bench import limits
from weight_sync.bench.payload import Payload, hold
from weight_sync.bench.processes import State, Worker, on_all
from weight_sync.bench.timing import WARM_UPS, make_row, timed


class Baseline(Protocol):
    """One way, opened. Between transfers the private tensors change."""

    verified: bool = False
    """Whether it compares hashes of what arrived itself."""

    def transfer(self) -> dict[str, float] | None:
        """Timed: when it returns, the other process has the present values of all tensors.

        What it returns goes into the row as medians, for example ``pause_s``.
        """

    def check(self) -> None:
        """Not timed: raise unless the other process has exactly the present values."""

    def close(self) -> None:
        """End all that was started."""


Open = Callable[[dict[str, torch.Tensor]], Baseline]


def find(source: str, payload: Payload) -> dict[str, Open]:
    """The baselines that a file or module offers for a payload. Raises ImportError, AttributeError or OSError."""
    path = Path(source)
    if path.suffix == ".py":
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {source}")
        # Importable by name, so that its own worker processes find what it sends them.
        if str(path.resolve().parent) not in sys.path:
            sys.path.insert(0, str(path.resolve().parent))
        source = path.stem
    return importlib.import_module(source).baselines(payload)


def measure(
    source: str, name: str, payload: Payload, repeats: int, timeout_s: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """A row of the results. Raises WorkerError."""
    worker = Worker(f"baseline {name}")
    try:
        on_all([worker], timeout_s, hold, payload)
        memcpy_gb_per_s = limits.memcpy_rate(worker, timeout_s)
        progress("starting")
        verified = on_all([worker], timeout_s, _open, source, name, payload)[0]
        rounds = []
        for number in range(1, WARM_UPS + repeats + 1):
            progress(f"round {number} of {WARM_UPS + repeats}")
            rounds.append(on_all([worker], timeout_s, _one_round, number)[0])
        on_all([worker], timeout_s, _close)
    finally:
        worker.close()
    rounds = rounds[WARM_UPS:]
    medians = {key: statistics.median(taken[key] for taken in rounds) for key in rounds[0] if key != "total_s"}
    seconds = [taken["total_s"] for taken in rounds]
    return make_row(
        "baseline", name, payload.nbytes, seconds, memcpy_gb_per_s=memcpy_gb_per_s, verified=verified, **medians
    )


def _open(state: State, source: str, name: str, payload: Payload) -> bool:
    state["baseline"] = find(source, payload)[name](state["shards"].tensors)
    return state["baseline"].verified


def _one_round(state: State, number: int) -> dict[str, float]:
    state["shards"].change(number)
    more: dict[str, float] = {}
    total_s = timed(lambda: more.update(state["baseline"].transfer() or {}))
    state["baseline"].check()
    return {"total_s": total_s, **more}


def _close(state: State) -> None:
    state.pop("baseline").close()
