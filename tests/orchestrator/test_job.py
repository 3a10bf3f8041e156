"""Jobs as users start them: real Ray, SGLang, torchtitan and shared memory, from the command line to the exit code."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from jobs import read_rows

REWARDS = Path(__file__).parent / "job_rewards.py"


def test_a_run_leaves_its_record_and_nothing_else(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(f"run_dir={run_dir}", "evaluation=chain_sum", "evaluation.sets.held_out.source.size=40")
    code, output = job.finish()
    assert code == 0, output
    assert "Before and after" in output
    assert job.left_behind() == []
    assert [row["step"] for row in read_rows(run_dir)] == [0, 1]
    for row in read_rows(run_dir):
        assert row["train/logprob_diff_mean"] < 1e-4
        assert row["train/logprob_diff_max"] < 1e-3
        assert row["sync/checked_engines"] == 1
        assert row["rollout/staleness_max"] == 0
        assert row["rollout/version_max"] == row["step"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["evaluation"]) == {"held_out", "held_out_greedy"}
    assert summary["logprob_diff"]["max"] < 1e-3
    assert summary["weight_sync"]["syncs"] == 2
    for name in ("curves.png", "samples/step-000001.jsonl", "final/model.safetensors", "final/tokenizer.json"):
        assert (run_dir / name).stat().st_size > 0
    again, message = start_job(f"run_dir={run_dir}").finish()
    assert (again, "already holds a run" in message) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_run_continues_with_the_next_step(start_job, tmp_path, number):
    run_dir = tmp_path / "run"
    job = start_job(f"run_dir={run_dir}", "trainer.steps=500")
    job.wait_for_steps(run_dir, 2)
    job.interrupt(number)
    code, output = job.finish(60)
    assert code == 128 + number
    assert f"interrupted by {number.name}" in output
    assert job.left_behind() == []
    saved = int(max(path.name for path in (run_dir / "checkpoints").iterdir()).removeprefix("step-"))
    code, output = start_job(f"run_dir={run_dir}", f"trainer.steps={saved + 1}", "resume=auto").finish()
    assert code == 0, output
    assert f"continuing after step {saved}" in output
    assert [row["step"] for row in read_rows(run_dir)] == list(range(saved + 1))
    assert read_rows(run_dir)[-1]["rollout/version_max"] == saved


def test_interrupted_while_starting(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(f"run_dir={run_dir}")
    job.wait_for(lambda: (run_dir / "config.yaml").exists())
    job.interrupt(signal.SIGINT)
    code, output = job.finish(60)
    assert (code, "interrupted" in output, "Traceback" in output) == (130, True, False), output
    assert job.left_behind() == []


def test_a_reward_that_raises_ends_the_run_with_one_message(start_job, tmp_path):
    job = start_job("reward.name=job_rewards:broken", environment={"PYTHONPATH": str(REWARDS.parent)})
    code, output = job.finish()
    assert code == 1
    assert "the run failed: " in output
    assert "no idea what this is" in output
    assert "Traceback" not in output
    assert job.left_behind() == []


def test_an_engine_that_does_not_start_ends_the_run(start_job, tmp_path):
    job = start_job("+rollout.server_options.attention_backend=nonsense")
    code, output = job.finish()
    assert code in (1, 2)
    assert "engine 0" in output
    assert "nonsense" in output
    assert "Traceback" not in output
    assert job.left_behind() == []


@pytest.mark.slow
def test_two_ranks_and_two_engines(start_job, tmp_path):
    run_dir = tmp_path / "run"
    shape = ["cluster.chips_per_host=4", "cluster.trainer_chips=2", "cluster.rollout_chips=2", "rollout.engines=2"]
    job = start_job(f"run_dir={run_dir}", "cluster.cpus_per_chip=0.25", "tracking.wandb.mode=offline", *shape)
    code, output = job.finish()
    assert code == 0, output
    assert list((run_dir / "wandb").glob("**/*.wandb"))
    assert all(row["sync/checked_engines"] == 2 for row in read_rows(run_dir))
    assert job.left_behind() == []
