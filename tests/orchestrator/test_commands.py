"""Sweeps, dry runs and the command line itself, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jobs import read_rows


def test_a_sweep_gives_every_run_its_directory_and_a_summary(start_job, tmp_path):
    job = start_job("-m", "seed=0,1", f"run_dir={tmp_path / 'sweep'}", "trainer.steps=1")
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    runs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [run.name for run in runs] == ["0", "1"]
    dumps = [(run / "samples" / "step-000000.jsonl").read_text().splitlines() for run in runs]
    prompts = [[json.loads(line)["prompt_id"] for line in dump] for dump in dumps]
    assert prompts[0] != prompts[1]
    summary = json.loads((tmp_path / "sweep" / "sweep_summary.json").read_text())
    assert [(run["settings"], run["status"]) for run in summary["runs"]] == [
        ({"seed": 0}, "finished"),
        ({"seed": 1}, "finished"),
    ]
    assert "Sweep" in output


def run(*arguments: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rl_tpu.train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_a_dry_run_prints_placement_and_arithmetic_and_starts_nothing(tmp_path):
    done = run("+experiment=qwen3_4b_dapo", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in (
        "trainer ranks 0-3",
        "engine 1, tensor parallel 2",
        "512 prompts x 16 answers = 8192",
        "dapo-math-17k.parquet",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+experiment=quickstart", "trainer.stps=1"], "did you mean 'trainer.steps'?"),
        (["+experiment=quickstart", "-m", "seed=0,-1"], "seed=-1"),
    ],
)
def test_wrong_command_lines_end_with_2_and_one_line(tmp_path, arguments, words):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_asynchronous_pacing_keeps_its_bound(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(f"run_dir={run_dir}", "rollout.max_staleness=1", "trainer.steps=4")
    code, output = job.finish()
    assert code == 0, output
    assert max(row["rollout/staleness_max"] for row in read_rows(run_dir)) == 1
