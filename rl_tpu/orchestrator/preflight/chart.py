"""The memory of a trainer and a rollout device in one picture."""

from __future__ import annotations

from pathlib import Path

from rl_tpu.orchestrator.preflight.memory import Memory
from rl_tpu.tracking.curves import COLORS

GIB = 2**30
LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "optimizer",
    "reference": "reference policy",
    "activations": "activations and the rest",
    "cache": "key-value cache",
}


def draw_memory(memory: Memory, path: Path, title: str) -> Path:
    """Stacked bars: a trainer device under each program, a rollout device; a line at each one's limit. A program that did
    not compile has no bar of activations, and says so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rollout = memory.rollout
    bars = [(f"trainer\n{each.program}", each.parts, each.limit, each.peak is None) for each in memory.trainer]
    bars.append(("rollout\nengine", {"weights": rollout.weights, "cache": rollout.kv_bytes}, rollout.limit, False))
    figure = Figure(figsize=(max(6.0, 1.7 * len(bars) + 3.0), 4.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    bottoms = [0.0] * len(bars)
    for color, (part, label) in zip(COLORS, LABELS.items(), strict=False):
        heights = [parts.get(part, 0) / GIB for _, parts, _, _ in bars]
        if any(heights):
            axes.bar(range(len(bars)), heights, 0.6, bottom=bottoms, color=color, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, (_, _, limit, refused) in enumerate(bars):
        axes.hlines(limit / GIB, place - 0.4, place + 0.4, color="#2b2f36", linewidth=1.6, label="limit" * (place == 0))
        text = "does not\ncompile" if refused else f"{bottoms[place]:.1f}"
        axes.annotate(text, (place, bottoms[place]), ha="center", va="bottom", fontsize=8.5, color="#4a525c")
    axes.set(title=title, ylabel="GiB of one device")
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=8.5)
    axes.set_ylim(0, 1.15 * max([*bottoms, *(limit / GIB for _, _, limit, _ in bars)]))
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8.5, frameon=False)
    temporary = path.with_suffix(".tmp.png")
    FigureCanvasAgg(figure).print_png(str(temporary))
    return temporary.replace(path)
