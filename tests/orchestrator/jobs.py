"""Whole jobs as a user starts them, and what they leave on the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

MARK = "RL_TPU_TEST_JOB"
SHORT = ["trainer.steps=2", "evaluation=none", "tracking.tensorboard=false", "data.train.size=200"]


@dataclass
class Job:
    """`python -m rl_tpu.train +experiment=quickstart ...` with a tiny random policy, in a process of its own."""

    overrides: list[str]
    cwd: Path
    module: str = "rl_tpu.train"
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.shared_memory_before = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "+experiment=quickstart", *self.overrides],
            cwd=self.cwd,
            env={**os.environ, MARK: self.mark, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"the job did not come that far:\n{self.process.communicate()[0]}")
            time.sleep(0.1)

    def wait_for_steps(self, run_dir: Path, steps: int) -> None:
        self.wait_for(lambda: rows(run_dir) >= steps)

    def interrupt(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def left_behind(self, grace_s: float = 10) -> list[str]:
        """Processes that carry this job's mark, and new files in /dev/shm; a dying process gets a moment."""
        deadline = time.monotonic() + grace_s
        while True:
            found = [p.info["name"] for p in psutil.process_iter(["name", "environ"]) if self._mine(p)]
            found += [
                name
                for name in set(os.listdir("/dev/shm")) - self.shared_memory_before
                if name.startswith(("weight_sync", "sglang", "sgl_")) and not self._of_others(name)
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.3)

    def _of_others(self, name: str) -> bool:
        """Whether a process of another run on this machine has the file mapped."""
        for process in psutil.process_iter(["environ"]):
            with suppress(OSError):
                if not self._mine(process) and f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                    return True
        return False

    def _mine(self, process: psutil.Process) -> bool:
        return (process.info["environ"] or {}).get(MARK) == self.mark


def rows(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def read_rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
