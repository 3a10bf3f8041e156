"""The results as a table for the terminal and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADER = ("", "send>recv", "GB/s", "of memcpy", "total s", "(min-max)", "pause s", "peak GB", "verified", "ours")
HASHING = {"none": "not hashed", "inline": "hashed", "ahead": "hashed ahead"}


def name_of(transport: str, hashing: str | None) -> str:
    """What distinguishes a measurement; other transports than shared memory are measured with hashes only."""
    return f"{transport}, {HASHING[hashing]}" if transport == "shared_memory" else transport


def label(row: dict[str, Any]) -> str:
    return name_of(row["transport"], row.get("hashing"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows in the order of measuring: limits, transports, baselines (``ours``: how much faster shared memory was)."""
    lines = [HEADER] + [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = []
    for line in lines:
        first, *others = (cell.ljust(width) if column == 0 else cell.rjust(width)
                          for column, (cell, width) in enumerate(zip(line, widths, strict=True)))  # fmt: skip
        text.append("  ".join([first, *others]).rstrip())
    text += [
        f"failed: {label(row)}, {row['senders']}>{row['receivers']}: {row['error']}" for row in rows if "error" in row
    ]
    return "\n".join(text)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    pair = "" if row["kind"] == "limit" else f"{row['senders']}>{row['receivers']}"
    if "error" in row:
        return (label(row), pair, "failed", *[""] * (len(HEADER) - 3))
    peaks = row.get("peak_rss_bytes") or {}
    peak = "/".join(f"{max(of_side) / 1e9:.1f}" for of_side in peaks.values() if of_side)
    return (
        label(row),
        pair,
        f"{row['gb_per_s']:.2f}",
        _number(row["ratio_to_memcpy"], ".2f"),
        f"{row['total_s']:.3f}",
        f"({row['min_s']:.3f}-{row['max_s']:.3f})",
        _number(row["pause_s"], ".3f"),
        peak,
        "" if row["kind"] == "limit" else ("yes" if row["verified"] else "no"),
        f"{row['ours_speedup']:.1f}x" if "ours_speedup" in row else "",
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of GB/s of rows without errors, on a logarithmic scale; the dashed line is memcpy in one thread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"limit": "0.6", "transport": "tab:blue", "baseline": "tab:orange"}
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
    names = [label(row) + ("" if row["kind"] == "limit" else f"  {row['senders']}>{row['receivers']}") for row in rows]
    places = range(len(rows), 0, -1)
    bars = axes.barh(places, [row["gb_per_s"] for row in rows], color=[colours[row["kind"]] for row in rows])
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("GB/s, from private tensors of the sender to tensors in the receiver")
    memcpy = [row["memcpy_gb_per_s"] for row in rows if row["memcpy_gb_per_s"]]
    if memcpy:
        axes.axvline(sorted(memcpy)[len(memcpy) // 2], color="0.3", linestyle="--", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    payload = max(row["payload_bytes"] for row in rows) / 1e9
    axes.set_title(f"{payload:.3g} GB; grey: this machine's limits, blue: weight_sync, orange: others", fontsize=9)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
