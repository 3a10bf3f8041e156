"""Two policies on the same prompts."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from rl_tpu.algorithms.statistics import PairedDifference, paired_difference
from rl_tpu.errors import UserError

Report = dict[str, Any]
"""What evaluation.json holds, see `evaluation_report`."""


def check_comparable(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Raise UserError unless two reports' ``settings`` are the same: sets, prompts, sampling, environment and reward.

    ``where`` the second one comes from.
    """
    refused = f"compare={where} cannot be compared:"
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            raise UserError(f"{refused} {name} is {'only there' if name in theirs else 'not there'}")
        one, other = ours[name], theirs[name]
        for key in dict.fromkeys([*one, *other]):
            if one.get(key) == other.get(key):
                continue
            if key == "prompts":
                raise UserError(f"{refused} {name} has other prompts there")
            raise UserError(f"{refused} {name}.{key} is {other.get(key)!r} there and {one.get(key)!r} here")


def compare(first: Report, second: Report, confidence: float) -> dict[str, dict[str, Any]]:
    """By set: ``metrics``, each with both values and their `PairedDifference` (first minus second), and a ``verdict``.

    Both reports must be comparable (`check_comparable`).
    """
    return {name: _compare_set(first["scores"][name], second["scores"][name], confidence) for name in first["scores"]}


def _compare_set(first: dict[str, Any], second: dict[str, Any], confidence: float) -> dict[str, Any]:
    metrics, differences = {}, {}
    for name in next(iter(first.values())):
        ours = [scores[name] for scores in first.values()]
        theirs = [second[prompt][name] for prompt in first]
        differences[name] = paired_difference(ours, theirs, confidence)
        metrics[name] = {"checkpoint": fmean(ours), "compare": fmean(theirs), **asdict(differences[name])}
    solved = any(metrics["pass@1"][side] for side in ("checkpoint", "compare"))
    decides = "pass@1" if solved else "reward_mean"
    return {"metrics": metrics, "verdict": verdict(decides, differences[decides], len(first), confidence)}


def verdict(metric: str, found: PairedDifference, prompts: int, confidence: float) -> str:
    """The comparison in a sentence."""
    numbers = (
        f"{metric} differs by {found.difference:+.3g}, {confidence:.3g} interval {found.low:+.3g} to {found.high:+.3g},"
        f" p = {found.p_value:.2g}, {prompts} prompts"
    )
    if found.p_value > 1 - confidence:
        return f"no difference at confidence {confidence:.3g} ({numbers})"
    return f"checkpoint is {'better' if found.difference > 0 else 'worse'} than compare ({numbers})"
