"""Evaluation while training goes on: versions, waiting, and what a run that was killed in the middle does."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from jobs import read_rows
from test_resume_job import kill_everything

TWO_ENGINES = ["rollout.engines=2", "cluster.rollout_chips=2", "cluster.chips_per_host=3", "cluster.cpus_per_chip=0.25"]
EVALUATION = [
    "evaluation=chain_sum",
    "evaluation.beside_training=true",
    "evaluation.every_steps=1",
    "evaluation.sets.held_out.source.size=100",
    "evaluation.sets.held_out_greedy.source.size=20",
]
LONG = ["evaluation.sets.held_out.source.size=800"]
"""So long that it goes on when the next steps are done."""


def evaluations(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def test_every_policy_is_evaluated_while_the_next_ones_are_made(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(f"run_dir={run_dir}", "trainer.steps=4", *TWO_ENGINES, *EVALUATION)
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    assert [(row["step"], row["version"]) for row in evaluations(run_dir)] == [(n, n) for n in range(5)]
    assert all("eval/held_out/pass@4" in row for row in evaluations(run_dir))
    assert [row["rollout/version_max"] for row in read_rows(run_dir)] == list(range(4))
    spans = [event for event in json.loads((run_dir / "timeline.json").read_text()) if event["ph"] == "X"]
    evaluated, trained = (
        [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == n] for n in ("evaluate", "step")
    )
    assert len(evaluated) == 5
    overlapping = [e for e in evaluated if any(e[0] < end and start < e[1] for start, end in trained)]
    assert len(overlapping) >= 2, (evaluated, trained)


@pytest.mark.slow
def test_a_run_killed_during_an_evaluation_makes_up_for_it(start_job, tmp_path):
    run_dir = tmp_path / "run"
    settings = [f"run_dir={run_dir}", *TWO_ENGINES, *EVALUATION, *LONG, "evaluation.every_steps=2"]
    settings += ["trainer.checkpoint.every_steps=1"]
    job = start_job(*settings, "trainer.steps=500")
    job.wait_for(lambda: (run_dir / "checkpoints/step-000002").exists())
    kill_everything(job)
    assert [row["step"] for row in evaluations(run_dir)] == [0]
    saved = int(max(path.name for path in (run_dir / "checkpoints").glob("step-*")).removeprefix("step-"))
    assert saved in (2, 3)
    job = start_job(*settings, f"trainer.steps={saved + 2}", "resume=auto")
    code, output = job.finish()
    assert code == 0, output
    assert [row["step"] for row in evaluations(run_dir)] == sorted({0, saved, *range(4, saved + 2, 2), saved + 2})
    assert all(row["step"] == row["version"] for row in evaluations(run_dir))


@pytest.mark.slow
def test_interrupted_during_an_evaluation(start_job, tmp_path):
    run_dir = tmp_path / "run"
    settings = [f"run_dir={run_dir}", *TWO_ENGINES, *EVALUATION, *LONG]
    job = start_job(*settings, "trainer.steps=500")
    job.wait_for_steps(run_dir, 1)
    job.interrupt(signal.SIGTERM)
    code, output = job.finish(90)
    assert code == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert job.left_behind() == []
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
