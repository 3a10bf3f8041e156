"""Seconds of repeated work, and the row that all kinds of measurements become."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

WARM_UPS = 1


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def repeated(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of every repeat after the warm-up."""
    return [timed(work) for _ in range(WARM_UPS + repeats)][WARM_UPS:]


def make_row(
    kind: str,
    transport: str,
    payload_bytes: int,
    seconds: Sequence[float],
    senders: int = 1,
    receivers: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A row of the results: ``kind`` is limit, transport or baseline, ``total_s`` the median, GB 10^9 bytes.

    Without seconds the measurement failed, and the row should have ``error``.
    """
    total_s = statistics.median(seconds) if seconds else None
    row = {
        "kind": kind,
        "transport": transport,
        "payload_bytes": payload_bytes,
        "senders": senders,
        "receivers": receivers,
        "total_s": total_s,
        "min_s": min(seconds, default=None),
        "max_s": max(seconds, default=None),
        "repeats": len(seconds),
        "pause_s": None,
        "gb_per_s": payload_bytes / 1e9 / total_s if total_s else None,
        "memcpy_gb_per_s": None,
        "ratio_to_memcpy": None,
        "verified": False,
        **more,
    }
    if row["gb_per_s"] and row["memcpy_gb_per_s"]:
        row["ratio_to_memcpy"] = row["gb_per_s"] / row["memcpy_gb_per_s"]
    return row
