"""Whole steps of rl_tpu beside TRL's, on this machine: answers written, scored and learnt from.

    python benchmarks/step.py --json FILE

Each side is a process of its own; a round runs all of them once. docs/benchmarks.md says what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import rl_tpu  # noqa: E402, F401 - before torch, which would load the TPU's backend
from benchmarks.trainer import trl_python  # noqa: E402
from benchmarks.whole_step import task  # noqa: E402

WARMUP = 2
"""Steps of every process that do not count: the first ones start caches and compile."""
TARGETS = {"w1": 1.0, "w2": 0.5}
"""What ours may take at most of TRL's seconds a step."""
MOST_ORCHESTRATION = 0.05
"""Share of a step that may be neither answers, rewards, training nor weights on their way."""
Steps = list[dict[str, float]]


def ours(directory: Path, workload: str, staleness: int, options: argparse.Namespace) -> Steps:
    """The parts of every counted step of a whole job, from its metrics.jsonl."""
    run_dir = Path(tempfile.mkdtemp(prefix=f"{workload}-", dir=directory))
    # Engine and trainer take turns, or share the cores: threads of both on all of them wait for each other.
    threads = options.threads if staleness == 0 else max(1, options.threads // 2)
    longest, shape = task.WORKLOADS[workload].longest, task.WORKLOADS[workload]
    settings = {
        "model": {"path": str(directory / "model"), "make": None},
        "data": {"max_prompt_tokens": shape.prompt_tokens},
        "data.train": {"kind": "file", "path": str(directory / "prompts.jsonl"), "task": None, "task_options": {}},
        "environment": {"name": "benchmarks.whole_step.ours:DrawnLengths", "options": {"workload": workload}},
        "reward": {"name": "benchmarks.whole_step.ours:digits"},
        "rollout": {
            "prompts_per_step": shape.prompts,
            "samples_per_prompt": task.ANSWERS,
            "max_response_tokens": longest,
            "context_tokens": shape.prompt_tokens + longest,
            "kv_cache_tokens": 65536,
            "max_running_requests": shape.prompts * task.ANSWERS,
            "threads_per_engine": threads,
            "max_staleness": staleness,
        },
        "trainer": {
            "steps": WARMUP + options.steps,
            "row_tokens": [2560],
            "microbatch_tokens": None,
            "threads_per_rank": threads,
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 0, "beta1": 0.9, "beta2": 0.95, "max_grad_norm": 1.0},
            "checkpoint": {"every_steps": 0, "export_final": False},
        },
        "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
        "weight_sync": {"check_engine_weights": False},
    }
    arguments = [f"++{name}.{key}={_value(value)}" for name, part in settings.items() for key, value in part.items()]
    arguments += ["data.train.part=all", "data.train.template='{prompt}'", "reward.options={}", "evaluation=none"]
    command = [sys.executable, "-m", "rl_tpu.train", "+experiment=quickstart", *arguments, f"run_dir={run_dir}"]
    _run(command, options.threads)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [parts(row) for row in rows[WARMUP:]]


def parts(row: dict[str, float]) -> dict[str, float]:
    """Where the seconds of a step went; of answers that are written while the trainer learns, what it waited for them."""
    generate, reward = row["perf/answering_s"], row["perf/rewarding_s"]
    if row["rollout/staleness_max"]:
        generate, reward = row["perf/generate_s"], 0.0
    learnt = row["train/tokens"] / row["train/tokens_per_s"]  # in the trainer's own process
    known = {"generate": generate, "reward": reward, "train": learnt, "sync": row["perf/sync_s"]}
    return {"step": row["perf/step_s"], **known, "orchestration": row["perf/step_s"] - sum(known.values())}


def trl(directory: Path, workload: str, micro: int, python: str, options: argparse.Namespace) -> Steps:
    program = ROOT / "benchmarks" / "whole_step" / "trl_steps.py"
    command = [python, str(program), "--task", str(directory), "--workload", workload, "--micro", str(micro)]
    command += ["--steps", str(WARMUP + options.steps), "--threads", str(options.threads)]
    return json.loads(_run(command, options.threads).splitlines()[-1])["steps"][WARMUP:]


def _value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "") if not isinstance(value, str) else value


def _run(command: list[str], threads: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--peers", type=Path, default=cache / "rl_tpu" / "peers-trl", help="environment of TRL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help=f"counted steps of a process, after {WARMUP} that are not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="beginnings of names to measure, separated by commas")
    options = parser.parse_args()
    python = trl_python(options.peers)
    measured: dict[str, list[Steps]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        task.write(directory)
        sides = {}
        for workload in TARGETS:
            for staleness in (0, 1):
                sides[f"{workload} ours k={staleness}"] = lambda w=workload, k=staleness: ours(directory, w, k, options)
            sides[f"{workload} TRL"] = lambda w=workload: trl(directory, w, 32, python, options)
        chosen = {name: side for name, side in sides.items() if name.startswith(tuple(options.only.split(",")))}
        for number in range(options.rounds):
            for name, side in chosen.items():
                measured.setdefault(name, []).append(side())
                seconds = statistics.median(step["step"] for step in measured[name][-1])
                print(f"round {number + 1}: {name}: {seconds:.2f} s a step", file=sys.stderr, flush=True)
    medians = {name: _medians(rounds) for name, rounds in measured.items()}
    ratios = _ratios(medians)
    if options.json:
        facts = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}
        facts |= {"cores": os.cpu_count(), "threads": options.threads}
        options.json.write_text(
            json.dumps({**facts, "ratios": ratios, "medians": medians, "steps": measured}, indent=1)
        )
    Console(width=120).print(_parts_table(medians), _ratio_table(ratios))


def _medians(rounds: list[Steps]) -> dict[str, float]:
    steps = [step for each in rounds for step in each]
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def _ratios(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    found = []
    for name, step in medians.items():
        workload, _, side = name.partition(" ")
        if side == "TRL":
            continue
        if f"{workload} TRL" in medians:
            value = step["step"] / medians[f"{workload} TRL"]["step"]
            found.append({"ratio": f"{name} / TRL", "value": value, "at_most": TARGETS[workload]})
        share = step["orchestration"] / step["step"]
        found.append({"ratio": f"{name}: orchestration / step", "value": share, "at_most": MOST_ORCHESTRATION})
    return found


def _parts_table(medians: dict[str, dict[str, float]]) -> Table:
    names = ("step", "generate", "reward", "train", "sync", "orchestration")
    table = Table("median seconds of a step", *names)
    for name, step in medians.items():
        table.add_row(name, *(f"{step[part]:.3f}" if part in step else "" for part in names))
    return table


def _ratio_table(ratios: list[dict[str, Any]]) -> Table:
    table = Table("ratio", "value", "at most")
    for ratio in ratios:
        table.add_row(ratio["ratio"], f"{ratio['value']:.3f}", f"{ratio['at_most']:g}")
    return table


if __name__ == "__main__":
    main()
