"""How fast a training step is and how much memory it takes, beside hand-written floors and TRL, on this machine.

    python benchmarks/trainer.py --json FILE

Every measurement is a process of its own. A round runs each of them once; rounds follow each other, so that what the
machine does meanwhile hits all alike. docs/benchmarks.md says what is compared and why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEPS = Path(__file__).parent / "training"
sys.path.insert(0, str(STEPS))
from workload import write_model  # noqa: E402

Runs = dict[str, list[dict[str, Any]]]
"""What each measured process printed, by its name, one entry per round."""


@dataclass(frozen=True)
class Measurement:
    """One process: the file in training/ that it runs, and its arguments."""

    name: str
    program: str
    arguments: str = ""
    steps: int | None = None
    warmup: int = 2

    def command(self, pythons: dict[str, str], options: argparse.Namespace, model: Path) -> list[str]:
        python = pythons.get(self.program, sys.executable)
        counts = ["--warmup", str(self.warmup), "--steps", str(self.steps or options.steps)]
        common = ["--model", str(model), "--threads", str(options.threads), *counts]
        return [*shlex.split(options.before), python, str(STEPS / self.program), *self.arguments.split(), *common]


def _floors(workload: str, padded: Sequence[int], packed: Sequence[int]) -> list[Measurement]:
    layouts = [("padded", micro) for micro in padded] + [("packed", micro) for micro in packed]
    return [
        Measurement(
            f"floor {workload} {layout} {micro}",
            "floor_step.py",
            f"--workload {workload} --layout {layout} --micro {micro}",
        )
        for layout, micro in layouts
    ]


def _trl(workload: str) -> list[Measurement]:
    return [
        Measurement(f"trl {workload} {micro}", "trl_step.py", f"--workload {workload} --micro {micro}", steps=2)
        for micro in (32, 128)
    ]


MEASUREMENTS = [
    Measurement("ours w1", "our_step.py", "--workload w1"),
    Measurement("sharing w1", "our_step.py", "--workload w1 --share-prompts"),
    *_floors("w1", padded=(8, 16, 32, 128), packed=(8, 16, 128)),
    *_trl("w1"),
    Measurement("ours w2", "our_step.py", "--workload w2"),
    Measurement("sharing w2", "our_step.py", "--workload w2 --share-prompts"),
    *_floors("w2", padded=(8, 16), packed=(8, 16)),
    *_trl("w2"),
    Measurement("prompts repeated", "our_step.py", "--workload long_prompts"),
    Measurement("prompts shared", "our_step.py", "--workload long_prompts --share-prompts"),
    Measurement("head plain", "head_step.py", "--path plain", steps=1, warmup=1),
    Measurement("head ours", "head_step.py", "--path ours", steps=1, warmup=1),
]


@dataclass(frozen=True)
class Ratio:
    """A figure of ours over the best of what it is compared with. `target` is what it may be at most."""

    name: str
    ours: str
    others: str
    figure: Callable[[dict[str, Any]], float]
    target: float | None = None

    def of(self, runs: Runs) -> dict[str, Any] | None:
        """Over all rounds, and in the round where it is least and most; None where something was not measured."""
        others = [name for name in runs if name.startswith(self.others)]
        if self.ours not in runs or not others:
            return None
        best = min(others, key=lambda name: self._median(runs[name]))
        each = [
            self.figure(mine) / self.figure(theirs) for mine, theirs in zip(runs[self.ours], runs[best], strict=True)
        ]
        value = self._median(runs[self.ours]) / self._median(runs[best])
        return {
            "ratio": self.name,
            "ours": self.ours,
            "best_of_others": best,
            "value": value,
            "least": min(each),
            "most": max(each),
            "target": self.target,
        }

    def _median(self, rounds: list[dict[str, Any]]) -> float:
        return statistics.median(map(self.figure, rounds))


def seconds(line: dict[str, Any]) -> float:
    return line["median_s"]


def seconds_per_token(line: dict[str, Any]) -> float:
    return line["median_s"] / line["tokens"]


def memory(line: dict[str, Any]) -> float:
    return line["peak_memory_gb"]


def memory_added(line: dict[str, Any]) -> float:
    return line["peak_memory_gb"] - line["memory_before_gb"]


RATIOS = [
    Ratio("time W1 / floor", "ours w1", "floor w1", seconds, 1.1),
    Ratio("time W1 / TRL", "ours w1", "trl w1", seconds, 0.9),
    Ratio("time W2 / TRL", "ours w2", "trl w2", seconds, 0.4),
    Ratio("time per token W2 / floor W2", "ours w2", "floor w2", seconds_per_token, 1.15),
    Ratio("time per token W2 / floor W1", "ours w2", "floor w1", seconds_per_token, 1.15),
    Ratio("time W1, prompts shared / floor", "sharing w1", "floor w1", seconds),
    Ratio("time W2, prompts shared / floor", "sharing w2", "floor w2", seconds),
    Ratio("peak memory W1 / TRL", "ours w1", "trl w1", memory, 1.0),
    Ratio("peak memory W2 / TRL", "ours w2", "trl w2", memory, 1.0),
    Ratio("peak memory of the head / plain", "head ours", "head plain", memory, 0.25),
    Ratio("memory added by the head / plain", "head ours", "head plain", memory_added),
    Ratio("time of the head / plain", "head ours", "head plain", seconds),
    Ratio("time shared prompts / repeated", "prompts shared", "prompts repeated", seconds),
    Ratio("memory added, shared prompts / repeated", "prompts shared", "prompts repeated", memory_added),
]


def trl_python(directory: Path) -> str:
    """Python of the environment in `directory` that has TRL; made there if it is missing or has other versions."""
    requirements = STEPS / "requirements-trl.txt"
    ready, python = directory / "requirements.txt", directory / "bin" / "python"
    if not ready.exists() or ready.read_text() != requirements.read_text():
        print(f"making the environment of TRL in {directory}", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*install, torch], check=True)
        subprocess.run([*install, "-r", requirements], check=True)
        shutil.copy(requirements, ready)
    return str(python)


def run(command: list[str], threads: int) -> dict[str, Any]:
    """The JSON line that `command` prints last."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_alike(runs: Runs) -> None:
    """End the benchmark where processes that should take the same step do not have the same gradient."""
    for workload in ("w1", "w2", "prompts", "head"):
        norms = {name: rounds[0]["gradient_norm"] for name, rounds in runs.items() if workload in name.split()}
        if norms and max(norms.values()) > 1.001 * min(norms.values()):
            sys.exit(f"these do not take the same step, their gradients' norms differ: {norms}")


def measurements_table(runs: Runs) -> Table:
    table = Table("measured", "s a step", "least", "most", "tokens/s", "peak GB")
    for name, rounds in runs.items():
        steps = [step for line in rounds for step in line["seconds"]]
        median = statistics.median(map(seconds, rounds))
        table.add_row(
            name,
            *(f"{value:.2f}" for value in (median, min(steps), max(steps))),
            f"{rounds[0]['tokens'] / median:,.0f}",
            f"{max(map(memory, rounds)):.2f}",
        )
    return table


def ratios_table(ratios: list[dict[str, Any]]) -> Table:
    table = Table("ratio", "over", "value", "by round", "at most")
    for ratio in ratios:
        table.add_row(
            ratio["ratio"],
            ratio["best_of_others"],
            f"{ratio['value']:.2f}",
            f"{ratio['least']:.2f} to {ratio['most']:.2f}",
            "" if ratio["target"] is None else f"{ratio['target']:g}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--peers", type=Path, default=cache / "rl_tpu" / "peers-trl", help="environment of TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a process, after two that are not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="beginnings of names to measure, separated by commas")
    parser.add_argument("--before", default="", help="command put before each process, as `taskset -c 0,1`")
    options = parser.parse_args()
    chosen = [piece for piece in MEASUREMENTS if piece.name.startswith(tuple(options.only.split(",")))]
    pythons = {}
    if any(piece.program == "trl_step.py" for piece in chosen):
        pythons["trl_step.py"] = trl_python(options.peers)
    runs: Runs = {piece.name: [] for piece in chosen}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model)
        for number in range(options.rounds):
            for piece in chosen:
                line = run(piece.command(pythons, options, model), options.threads)
                runs[piece.name].append(line)
                print(f"round {number + 1}: {piece.name}: {line['median_s']:.2f} s", file=sys.stderr, flush=True)
    check_alike(runs)
    ratios = [result for ratio in RATIOS if (result := ratio.of(runs))]
    if options.json:
        facts = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "threads": options.threads,
            "ratios": ratios,
            "runs": runs,
        }
        options.json.write_text(json.dumps(facts, indent=1))
    console = Console(width=110)
    console.print(measurements_table(runs), ratios_table(ratios))


if __name__ == "__main__":
    main()
