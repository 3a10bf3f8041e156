"""What `rollout.max_staleness` costs in accuracy, and what it saves in time.

    python benchmarks/pacing.py --json FILE
    python benchmarks/pacing.py --only time --steps 20

docs/benchmarks.md says what is measured and why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import rl_tpu  # noqa: E402, F401 - before torch, which would load the TPU's backend
from benchmarks.paced import tail  # noqa: E402
from benchmarks.whole_step import task  # noqa: E402

STALENESS = (0, 1, 4)
WITHIN = 0.05
"""How far apart the mean accuracies may be."""
OF_LIMIT = 0.8
"""What a step's perfect overlap may be of its time, at least."""
WARMUP = 3
"""Steps of every process that do not count: the first ones start caches and fill the pipeline."""
DRAIN = 3
"""Steps at the end that do not count either: nothing more is drawn while they train."""
PROMPTS, ANSWERS = 32, 4
PACINGS = {
    "k=0": [],
    "k=1": ["rollout.max_staleness=1"],
    "k=2, retract": ["rollout.max_staleness=2"],
    "k=2, in place": ["rollout.max_staleness=2", "weight_sync.pause_mode=in_place"],
    "k=1, oversampling 1.5, drop": [
        "rollout.max_staleness=1",
        "rollout.oversampling=1.5",
        "rollout.stale_groups=drop",
        "weight_sync.pause_mode=in_place",
    ],
}
KEPT = (
    *(f"perf/{part}_s" for part in ("generate", "prepare", "train", "sync")),
    *(f"rollout/{name}" for name in ("staleness_mean", "token_staleness_mean", "mixed_version_share", "tail_wait_s")),
    *(f"rollout/{name}" for name in ("dropped_stale_groups", "in_flight_groups", "response_tokens_mean")),
    "rollout/response_tokens_max_to_mean",
    "sync/pause_s",
)
"""Metrics of the steps whose means are written down."""


def accuracy(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Final held-out accuracy of the quickstart by max_staleness and seed, and the largest staleness of any batch."""
    runs = []
    for staleness in STALENESS:
        for seed in range(options.seeds):
            run_dir = directory / f"accuracy-{staleness}-{seed}"
            settings = [f"seed={seed}", f"rollout.max_staleness={staleness}", "tracking.tensorboard=false"]
            settings += [f"trainer.steps={options.steps}"] if options.steps else []
            job("train", ["+experiment=quickstart", *settings, f"run_dir={run_dir}"])
            evaluations = read(run_dir / "evaluations.jsonl")
            seen = max(row["rollout/staleness_max"] for row in read(run_dir / "metrics.jsonl"))
            if seen > staleness:
                sys.exit(f"{run_dir}: a batch was {seen} versions old, max_staleness is {staleness}")
            name = "eval/held_out/pass@1"
            runs.append({"max_staleness": staleness, "seed": seed, "staleness_max": seen})
            runs[-1] |= {"before": evaluations[0][name], "after": evaluations[-1][name]}
            say(f"max_staleness {staleness}, seed {seed}: {evaluations[0][name]:.3f} -> {evaluations[-1][name]:.3f}")
    by_staleness = {k: [run["after"] for run in runs if run["max_staleness"] == k] for k in STALENESS}
    means = {k: fmean(values) for k, values in by_staleness.items()}
    table = Table("max_staleness", "accuracy", "least", "most", "deviation", "largest staleness")
    for k, values in by_staleness.items():
        seen = max(run["staleness_max"] for run in runs if run["max_staleness"] == k)
        numbers = (means[k], min(values), max(values), pstdev(values))
        table.add_row(str(k), *(f"{number:.3f}" for number in numbers), str(seen))
    apart = max(means.values()) - min(means.values())
    Console(width=120).print(table, f"means are {apart:.3f} apart, at most {WITHIN} is wanted")
    return {"runs": runs, "means": means, "apart": apart, "at_most": WITHIN}


def time_per_step(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step by pacing, and those of its parts alone."""
    task.write(directory)
    common = tail_settings(directory, WARMUP + (options.steps or 20) + DRAIN)
    found: dict[str, dict[str, Any]] = {}
    train_alone = 0.0
    for name, pacing in PACINGS.items():
        run_dir = directory / f"time-{len(found)}"
        job("train", [*common, *pacing, f"run_dir={run_dir}"])
        rows = read(run_dir / "metrics.jsonl")[WARMUP:-DRAIN]
        if not found:  # synchronous: while it trains nothing else goes on
            train_alone = fmean(row["perf/prepare_s"] + row["perf/train_s"] for row in rows)
        alone = directory / f"generate-{len(found)}"
        job("generate", [*common, *pacing, f"run_dir={alone}"])
        step, generate_alone = seconds_per_step(run_dir), seconds_per_step(alone)
        found[name] = {"step": step, "generate_alone": generate_alone, "train_alone": train_alone}
        first = found["k=0"]
        limits = {"limit": first["generate_alone"], "overlapping limit": generate_alone}
        for limit, seconds in limits.items():
            found[name] |= {limit: max(seconds, train_alone), f"{limit} / step": max(seconds, train_alone) / step}
        found[name]["of k=0"] = step / first["step"]
        found[name] |= {metric: fmean(row[metric] for row in rows) for metric in KEPT}
        found[name]["largest staleness"] = max(row["rollout/staleness_max"] for row in rows)
        say(f"{name}: {step:.2f} s a step, generating alone {generate_alone:.2f}, training alone {train_alone:.2f}")
    names = ("step", "of k=0", "generate_alone", "train_alone", "limit / step", "overlapping limit / step")
    more = ("rollout/staleness_mean", "rollout/mixed_version_share", "rollout/dropped_stale_groups")
    table = Table("seconds", *names, *(name.removeprefix("rollout/") for name in more))
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:.2f}" for column in (*names, *more)))
    Console(width=160).print(table, f"limit / step is to be at least {OF_LIMIT} with k >= 1")
    return {"pacings": found, "at_least": OF_LIMIT}


def tail_settings(directory: Path, steps: int) -> list[str]:
    """A job with the model and the prompts of the directory, and `paced.tail`'s answers and reward."""
    longest = tail.SHORT[1] * tail.LONGER
    settings = {
        "model": {"path": str(directory / "model"), "make": None},
        "data": {"max_prompt_tokens": 32},
        "data.train": {"kind": "file", "path": str(directory / "prompts.jsonl"), "task": None, "task_options": {}},
        "environment": {"name": "benchmarks.paced.tail:HeavyTail"},
        "reward": {"name": "benchmarks.paced.tail:slow_digits", "workers": PROMPTS},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": ANSWERS,
            "max_response_tokens": longest,
            "context_tokens": 32 + longest,
            "kv_cache_tokens": 65536,
            "max_running_requests": 4 * PROMPTS * ANSWERS,
            "threads_per_engine": 1,
        },
        "trainer": {
            "steps": steps,
            "row_tokens": [1024],
            "microbatch_tokens": None,
            "threads_per_rank": 1,
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 0},
            "checkpoint": {"every_steps": 0, "export_final": False},
        },
        "weight_sync": {"check_engine_weights": False},
    }
    common = [f"++{name}.{key}={_value(value)}" for name, part in settings.items() for key, value in part.items()]
    common += ["+experiment=quickstart", "data.train.part=all", "data.train.template='{prompt}'", "reward.options={}"]
    return [*common, "evaluation=none", "tracking.tensorboard=false"]


def seconds_per_step(run_dir: Path) -> float:
    """Mean of the counted steps, from the beginning of each to that of the next."""
    text = (run_dir / "timeline.json").read_text().rstrip().rstrip(",]")
    starts = sorted(event["ts"] for event in json.loads(text + "]") if event["name"] == "step")
    return fmean((later - earlier) / 1e6 for earlier, later in list(pairwise(starts))[WARMUP : 1 - DRAIN])


def job(entry: str, settings: list[str]) -> None:
    """Run `python -m rl_tpu.ENTRY` to its end."""
    command = [sys.executable, "-m", f"rl_tpu.{entry}", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "") if not isinstance(value, str) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--only", choices=["accuracy", "time"])
    parser.add_argument("--steps", type=int, help="of each run (default: the quickstart's; 20 counted ones for time)")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each max_staleness (accuracy)")
    options = parser.parse_args()
    facts = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
    facts |= {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    measured: dict[str, Any] = {}
    for part, measure in {"time": time_per_step, "accuracy": accuracy}.items():
        if options.only in (None, part):
            with tempfile.TemporaryDirectory() as directory:
                measured[part] = measure(Path(directory), options)
            if options.json:
                options.json.write_text(json.dumps(facts | measured, indent=1))


if __name__ == "__main__":
    main()
