"""What a run, or a sweep of runs, came to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from rl_tpu.tracking.console import number
from rl_tpu.tracking.evaluation_names import without_details
from rl_tpu.tracking.json_files import to_json, write_atomically
from rl_tpu.tracking.run_directory import RunDirectory

Comparison = dict[str, dict[str, dict[str, float | None]]]


def compare_evaluations(evaluations: list[dict[str, Any]]) -> Comparison:
    """``{set: {metric: {before, after, change}}}`` from the first and the last row of evaluations.jsonl.

    With one row only, or a value that is missing or not finite, ``after`` or ``change`` is None.
    """
    if not evaluations:
        return {}
    first, last = evaluations[0], evaluations[-1] if len(evaluations) > 1 else {}
    comparison: Comparison = {}
    for name in dict.fromkeys(name for row in (first, last) for name in row if name.startswith("eval/")):
        set_name, metric = name.removeprefix("eval/").rsplit("/", 1)
        before, after = first.get(name), last.get(name)
        change = after - before if before is not None and after is not None else None
        comparison.setdefault(set_name, {})[metric] = {"before": before, "after": after, "change": change}
    return comparison


def run_totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Over all steps: the worst deviation of the trainer's log-probabilities from the engine's, and weight-sync totals.

    ``logprob_diff``: ``mean`` and ``max``, the largest of ``train/logprob_diff_mean`` and ``_max``. ``weight_sync``: how
    many syncs, their bytes, and seconds in all, of staging and of standing still.
    """

    def column(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    sync = {"bytes": "sync/bytes", "seconds": "perf/sync_s", "stage_s": "sync/stage_s", "pause_s": "sync/pause_s"}
    return {
        "logprob_diff": {kind: max(column(f"train/logprob_diff_{kind}"), default=None) for kind in ("mean", "max")},
        "weight_sync": {
            "syncs": len(column("sync/bytes")),
            **{name: sum(column(source)) for name, source in sync.items()},
        },
    }


def before_after_table(comparison: Comparison, title: str = "Before and after") -> Table:
    """One line per evaluation set and metric; summary.json has the details as well."""
    table = Table("set", "metric", title=title, title_justify="left")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for set_name, metrics in comparison.items():
        table.add_section()
        for metric in without_details(metrics):
            values = metrics[metric]
            table.add_row(
                set_name, metric, _cell(values["before"]), _cell(values["after"]), _cell(values["change"], "+")
            )
    return table


def sweep_summary(run_directories: Iterable[Path], output: Path) -> Table:
    """Compare several runs and write what the table holds to ``output`` (sweep_summary.json).

    A line per run: the settings in which the runs differ, status, final training reward, pass@1 of every evaluation set
    before and after, total hours. A run that left no readable summary.json is listed as such.
    """
    runs = [(path, *_read_run(RunDirectory(Path(path)))) for path in run_directories]
    varied = _differing_settings([config for _, config, _ in runs])
    entries = []
    for (path, _, summary), settings in zip(runs, varied, strict=True):
        entries.append(
            {
                "run": str(path),
                "settings": settings,
                "status": summary.get("status", "no summary"),
                "reward": summary.get("final_metrics", {}).get("reward/mean"),
                "evaluation": summary.get("evaluation", {}),
                "hours": (seconds := summary.get("seconds", {}).get("step")) and seconds / 3600,
            }
        )
    write_atomically(output, to_json({"runs": entries}, indent=2) + "\n")
    return _sweep_table(entries)


def _sweep_table(entries: list[dict[str, Any]]) -> Table:
    settings = list(dict.fromkeys(name for entry in entries for name in entry["settings"]))
    evaluations = [item for entry in entries for item in entry["evaluation"].items()]
    # One number per set keeps the table narrow enough to read; the file has them all.
    metrics = list(dict.fromkeys((name, "pass@1") for name, values in evaluations if "pass@1" in values))
    table = Table("run", *settings, "status", title="Sweep", title_justify="left")
    for heading in ("reward", *(f"{set_name} {metric}" for set_name, metric in metrics), "hours"):
        table.add_column(heading, justify="right")
    for entry in entries:
        results = [entry["evaluation"].get(set_name, {}).get(metric, {}) for set_name, metric in metrics]
        table.add_row(
            Path(entry["run"]).name,
            *(str(entry["settings"].get(name, "")) for name in settings),
            entry["status"],
            _cell(entry["reward"]),
            *(f"{_cell(result.get('before'))} → {_cell(result.get('after'))}" for result in results),
            _cell(entry["hours"]),
        )
    return table


def _read_run(directory: RunDirectory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration (flat, dotted names) and summary of a run; empty where a file is missing or broken."""
    try:
        config = _flat(yaml.safe_load(directory.config.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError):
        config = {}
    try:
        summary = json.loads(directory.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    return config, summary


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    items = [_flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()]
    return {name: item for part in items for name, item in part.items()}


def _differing_settings(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every configuration the settings that are not the same in all of them; where it is stored does not count."""
    names = dict.fromkeys(name for config in configs for name in config if name != "run_dir")
    varied = [name for name in names if len({repr(config.get(name)) for config in configs if config}) > 1]
    return [{name: config.get(name) for name in varied if config} for config in configs]


def _cell(value: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return ("+" if sign and value > 0 else "") + number(value)
