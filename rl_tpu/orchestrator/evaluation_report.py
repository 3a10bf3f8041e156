"""What an evaluation leaves behind: evaluation.json, every sample, and tables for the reader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.comparison import Report
from rl_tpu.orchestrator.evaluation import EvalResult, EvalSet
from rl_tpu.registry import one_line
from rl_tpu.tracking.console import number
from rl_tpu.tracking.json_files import to_json, write_atomically
from rl_tpu.tracking.sample_dump import sample_rows
from rl_tpu.types import Prompt

KEYS = ("model", "settings", "evaluation", "scores")
_SET = "evaluation.sets."
FILE = "evaluation.json"


def comparable_settings(config: RunConfig, sets: list[EvalSet]) -> dict[str, dict[str, Any]]:
    """What two evaluations must share to be compared: per set its sampling and a digest of its prompts; environment and
    reward."""
    found = {_SET + chosen.name: _set_settings(config, chosen) for chosen in sets}
    reward = config.reward.model_dump(mode="json", exclude={"workers", "worker_memory_gb"})
    return found | {"environment": config.environment.model_dump(mode="json"), "reward": reward}


def evaluation_report(model: Path, settings: dict[str, Any], results: dict[str, EvalResult]) -> Report:
    """
    model       the directory that was evaluated
    settings    see `comparable_settings`
    evaluation  the metrics of every set
    scores      per set and prompt id: the scores whose means over prompts are metrics
    """
    return {
        "model": str(model),
        "settings": settings,
        "evaluation": {name: result.metrics for name, result in results.items()},
        "scores": {
            name: {group.prompt.id: scores for group, scores in zip(result.groups, result.scores, strict=True)}
            for name, result in results.items()
        },
    }


def write_samples(directory: Path, results: dict[str, EvalResult]) -> None:
    """Write samples/SET.jsonl of every set, rows as in a training run's samples. Raises RunError."""
    for name, result in results.items():
        rows = sample_rows(0, result.groups)
        _write(directory / "samples" / f"{name}.jsonl", (to_json(row) + "\n" for row in rows))


def write_report(directory: Path, report: Report) -> Path:
    """Write evaluation.json. Raises RunError."""
    return _write(directory / FILE, to_json(report, indent=1) + "\n")


def read_report(path: Path) -> Report:
    """An earlier evaluation.json. Raises UserError if it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"compare={path} cannot be read: {one_line(error)}") from None
    missing = [key for key in KEYS if not isinstance(report, dict) or key not in report]
    if missing:
        raise UserError(f"compare={path} is no evaluation.json of this program: it has no {', '.join(missing)}")
    settings, scores = report["settings"], report["scores"]
    whole = isinstance(settings, dict) and isinstance(scores, dict)
    whole = whole and {name for name in settings if name.startswith(_SET)} == {_SET + name for name in scores}
    if not whole or not all(isinstance(each, dict) and each for each in (*settings.values(), *scores.values())):
        raise UserError(f"compare={path} is not whole: it should have the settings and the scores of the same sets")
    return report


def evaluation_table(evaluation: dict[str, dict[str, float]]) -> Table:
    """One line per set and metric; the bounds of an interval stand beside its metric."""
    table = Table("set", "metric", title="Evaluation", title_justify="left")
    table.add_column("value", justify="right")
    table.add_column("interval")
    for name, metrics in evaluation.items():
        table.add_section()
        for metric, value in metrics.items():
            if metric.endswith(("_low", "_high")):
                continue
            bounds = [metrics.get(f"{metric}_{end}") for end in ("low", "high")]
            table.add_row(name, metric, number(value), "" if None in bounds else " to ".join(map(number, bounds)))
    return table


def comparison_table(comparison: dict[str, dict[str, Any]]) -> Table:
    """Both values, the difference, its interval and the p-value of every set and metric."""
    table = Table("set", "metric", title="Comparison", title_justify="left")
    for column in ("checkpoint", "compare", "difference", "interval", "p"):
        table.add_column(column, justify="right")
    for name, compared in comparison.items():
        table.add_section()
        for metric, values in compared["metrics"].items():
            interval = f"{number(values['low'])} to {number(values['high'])}"
            numbers = [number(values[column]) for column in ("checkpoint", "compare", "difference")]
            table.add_row(name, metric, *numbers, interval, f"{values['p_value']:.2g}")
    return table


def _write(path: Path, text: str | Iterable[str]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _set_settings(config: RunConfig, chosen: EvalSet) -> dict[str, Any]:
    settings = chosen.config.model_dump(mode="json", exclude={"source"})
    if settings["seed"] is None:
        settings["seed"] = config.seed
    if settings["max_response_tokens"] is None:
        settings["max_response_tokens"] = config.rollout.max_response_tokens
    return settings | {"prompts": _digest(chosen.prompts)}


def _digest(prompts: list[Prompt]) -> str:
    """Of what is asked, not of the ids that a tokenizer makes of it."""
    rows = [(prompt.id, prompt.messages, prompt.answer, prompt.sampling) for prompt in prompts]
    return hashlib.blake2b(to_json(rows).encode(), digest_size=16).hexdigest()
