"""Seconds of repeated work, and the row that all kinds of measurements become."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WARM_UPS = 1
Figures = dict[str, float]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def repeated(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of every repeat after the warm-up."""
    return [timed(work) for _ in range(WARM_UPS + repeats)][WARM_UPS:]


def each_round(repeats: int, progress: Callable[[str], None]) -> Iterator[int]:
    """The numbers of the warm-up and of the rounds after it, each announced."""
    for number in range(1, WARM_UPS + repeats + 1):
        progress(f"round {number} of {WARM_UPS + repeats}")
        yield number


def make_row(
    kind: str,
    transport: str,
    payload_bytes: int,
    rounds: Sequence[Figures],
    senders: int = 1,
    receivers: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A row of the results: ``kind`` is limit, transport or baseline, GB 10^9 bytes.

    Every round has its ``total_s``; of this and of all other figures the row has the medians. Without rounds the
    measurement failed, and the row should have ``error``.
    """
    seconds = [figures["total_s"] for figures in rounds]
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in (rounds[0] if rounds else ())}
    total_s = medians.get("total_s")
    row = {
        "kind": kind,
        "transport": transport,
        "payload_bytes": payload_bytes,
        "senders": senders,
        "receivers": receivers,
        "total_s": None,
        "min_s": min(seconds, default=None),
        "max_s": max(seconds, default=None),
        "repeats": len(rounds),
        "pause_s": None,
        "gb_per_s": payload_bytes / 1e9 / total_s if total_s else None,
        "memcpy_gb_per_s": None,
        "ratio_to_memcpy": None,
        "verified": False,
        **medians,
        **more,
    }
    if row["gb_per_s"] and row["memcpy_gb_per_s"]:
        row["ratio_to_memcpy"] = row["gb_per_s"] / row["memcpy_gb_per_s"]
    return row
