"""The curves of a run in one picture."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_tpu.tracking.evaluation_names import PASS_AT, headline
from rl_tpu.tracking.json_files import read_rows
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.sink import Metrics, Sink
from rl_tpu.tracking.timing import PARTS, part_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]

COLORS = ("#3b6fb6", "#d1603d", "#4c9f70", "#8a63b0", "#c99a2e", "#5f6b7a", "#b0527d", "#3fa7b5")
SMOOTH_FROM = 60
"""Steps from which on a curve is drawn pale under its running mean."""


class CurvesSink(Sink):
    """Redraws ``curves.png`` at every evaluation and at the end, from the files of the run."""

    name = "curves"

    def __init__(self, directory: RunDirectory, plot_metrics: list[str]) -> None:
        self._directory, self._plot_metrics = directory, plot_metrics

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        if step > 0:  # before that there is no curve
            draw_curves(self._directory, self._plot_metrics)

    def finish(self, summary: dict[str, Any]) -> None:
        draw_curves(self._directory, self._plot_metrics)


def draw_curves(directory: RunDirectory, plot_metrics: list[str] | tuple[str, ...] = ()) -> Path:
    """Draw ``curves.png`` from metrics.jsonl and evaluations.jsonl, 1200 pixels wide; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and pyplot's global state left alone
    from matplotlib.figure import Figure

    rows, evaluations = read_rows(directory.metrics), read_rows(directory.evaluations)
    panels = [_reward, _evaluation, _groups, _response_length, _entropy, _grad_norm, _logprob_diff, _seconds]
    panels += [_metric_panel(name) for name in plot_metrics]
    lines = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 2.9 * lines + 0.5), dpi=100, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    figure.suptitle(f"{directory.path.parent.name}/{directory.path.name}", fontsize=11, color="#5f6b7a")
    axes = list(figure.subplots(lines, 2, squeeze=False).flat)
    for panel, ax in zip(panels, axes, strict=False):
        panel(ax, rows, evaluations)
        _dress(ax)
    for ax in axes[len(panels) :]:
        ax.remove()
    temporary = directory.curves.with_name("curves.tmp.png")
    FigureCanvasAgg(figure).print_png(str(temporary))
    return temporary.replace(directory.curves)


def _reward(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Reward", ylabel="reward")
    steps, means, stds = _columns(rows, "reward/mean", "reward/std")
    if steps:
        low = [mean - std for mean, std in zip(means, stds, strict=True)]
        high = [mean + std for mean, std in zip(means, stds, strict=True)]
        ax.fill_between(steps, low, high, color=COLORS[0], alpha=0.1, linewidth=0, label="± standard deviation")
    _curve(ax, rows, "reward/mean", COLORS[0], "mean")


def _evaluation(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    sets: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in evaluations for name in row if name.startswith("eval/")):
        set_name, metric = name.removeprefix("eval/").rsplit("/", 1)
        sets.setdefault(set_name, []).append(metric)
    chosen = [(each, metric) for each, metrics in sets.items() for metric in headline(metrics)]
    shares = [(each, metric) for each, metric in chosen if PASS_AT.fullmatch(metric)]
    shown = shares or chosen
    ax.set(title="Held-out evaluation", ylabel="share of prompts" if shares else "value")
    for color, (set_name, metric) in zip(_cycle(len(shown)), shown, strict=True):
        name = f"eval/{set_name}/{metric}"
        steps, values = _columns(evaluations, name)
        if not steps:
            continue
        label = f"{set_name}/{metric}"
        if len(values) > 1:
            label += f": {values[0]:.3g} → {values[-1]:.3g}"
        ax.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.6, label=label)
        steps, values, low, high = _columns(evaluations, name, f"{name}_low", f"{name}_high")
        if steps:
            errors = [np.subtract(values, low), np.subtract(high, values)]
            ax.errorbar(steps, values, errors, color=color, fmt="none", elinewidth=1, capsize=2, alpha=0.6)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top + 0.1 * len(shown) * (top - bottom))  # room for the legend, which carries the numbers


def _groups(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Groups", ylabel="share of groups", ylim=(-0.03, 1.03))
    steps, uniform = _columns(rows, "rollout/uniform_group_share")
    if steps:
        ax.fill_between(steps, uniform, color="#d5dae0", linewidth=0, label="all rewards equal: nothing learnt")
    _curve(ax, rows, "rollout/solve_none", COLORS[1], "no sample solved")
    _curve(ax, rows, "rollout/solve_all", COLORS[2], "all samples solved")


def _response_length(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Response length", ylabel="tokens")
    _curve(ax, rows, "rollout/response_tokens_max", COLORS[5], "max")
    _curve(ax, rows, "rollout/response_tokens_mean", COLORS[0], "mean")
    ax.set_ylim(bottom=0)


def _entropy(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Entropy of the policy", ylabel="nats per token")
    _curve(ax, rows, "train/entropy", COLORS[3])


def _grad_norm(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Gradient norm (before clipping)", ylabel="norm")
    _curve(ax, rows, "train/grad_norm", COLORS[4])


def _logprob_diff(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Log-probability, trainer against engine", ylabel="|difference| per token", yscale="log")
    _curve(ax, rows, "train/logprob_diff_mean", COLORS[0], "mean")
    _curve(ax, rows, "train/logprob_diff_max", COLORS[5], "max")


def _seconds(ax: Axes, rows: Rows, evaluations: Rows) -> None:
    ax.set(title="Seconds of a step", ylabel="seconds")
    seconds = [part_seconds(row) for row in rows]
    parts = [part for part in PARTS if any(part in row for row in seconds)]
    if parts:
        heights = [[row.get(part, 0.0) for row in seconds] for part in parts]
        steps = [row["step"] for row in rows]
        ax.stackplot(steps, heights, labels=parts, colors=_cycle(len(parts)), alpha=0.8, linewidth=0)
    _curve(ax, rows, "perf/step_s", "#2b2f36", "whole step")


def _metric_panel(name: str) -> Any:
    def panel(ax: Axes, rows: Rows, evaluations: Rows) -> None:
        ax.set(title=name, ylabel=name.rpartition("/")[2])
        _curve(ax, evaluations if name.startswith("eval/") else rows, name, COLORS[0])

    return panel


def _curve(ax: Axes, rows: Rows, name: str, color: str, label: str | None = None) -> None:
    steps, values = _columns(rows, name)
    if not steps:
        return
    if len(steps) < SMOOTH_FROM:
        ax.plot(steps, values, color=color, linewidth=1.6, label=label, marker="o" if len(steps) == 1 else None)
        return
    ax.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    window = len(values) // 30
    windows = [values[max(0, i - window) : i + window + 1] for i in range(len(values))]
    ax.plot(steps, [fmean(part) for part in windows], color=color, linewidth=1.8, label=label)


def _columns(rows: Rows, *names: str) -> tuple[list[float], ...]:
    """Steps and the named metrics of the rows that have them all as finite numbers."""
    kept = [row for row in rows if all(isinstance(row.get(name), int | float) for name in names)]
    return tuple([row[name] for row in kept] for name in ("step", *names))


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _dress(ax: Axes) -> None:
    """Light: no box, a faint grid, a legend that hides nothing."""
    if not ax.has_data():
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="#9aa3ad")
    ax.set_xlabel("step", fontsize=9)
    ax.title.set(fontsize=11, fontweight="bold", color="#2b2f36")
    ax.yaxis.label.set_fontsize(9)
    ax.tick_params(labelsize=8.5, color="#c4cad1", labelcolor="#4a525c")
    ax.grid(color="#e6e9ed", linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#c4cad1")
    ax.xaxis.get_major_locator().set_params(integer=True)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none", loc="best")
