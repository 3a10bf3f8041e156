"""Other ways to move weights, given as a Python file and measured as the transports are: one process to one other.

The file (or module) has a function ``baselines(payload)`` that returns functions by name, each of which opens one way
for a dict of private tensors. It is called in a process of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from weight_sync.bench.payload import Payload
from weight_sync.bench.processes import State, on_all
from weight_sync.bench.timing import WARM_UPS, Figures, each_round, make_row, timed
from weight_sync.bench.transfer import HASHED, Group


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


def measure(group: Group, source: str, name: str, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """A row of the results. Raises WorkerError.

    Between its rounds shared memory moves the same tensors of the same process: ``ours_s`` is what that took, and
    ``ours_speedup`` how many times longer the baseline takes.
    """
    theirs = group.senders[:1]
    with group.opened(HASHED):
        verified = on_all(theirs, group.timeout_s, _open, source, name, group.payload)[0]
        rounds = []
        for _ in each_round(repeats, progress):
            ours, _ = group.one_round(HASHED)
            taken = on_all(theirs, group.timeout_s, _one_round)[0]
            rounds.append({"memcpy_gb_per_s": ours["memcpy_gb_per_s"], "ours_s": ours["total_s"], **taken})
        on_all(theirs, group.timeout_s, _close)
    row = make_row("baseline", name, group.payload.nbytes, rounds[WARM_UPS:], verified=verified)
    return row | {"ours_speedup": row["total_s"] / row["ours_s"]}


def _open(state: State, source: str, name: str, payload: Payload) -> bool:
    state["baseline"] = find(source, payload)[name](state["shards"].tensors)
    return state["baseline"].verified


def _one_round(state: State) -> Figures:
    """With the values that the round of shared memory before it has made."""
    more: dict[str, float] = {}
    total_s = timed(lambda: more.update(state["baseline"].transfer() or {}))
    state["baseline"].check()
    return {"total_s": total_s, **more}


def _close(state: State) -> None:
    state.pop("baseline").close()
