"""Jobs whose samples come from an agent that speaks the OpenAI API."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from jobs import Job, read_rows

ENVIRONMENT = ["environment=openai_agent", "rollout.max_response_tokens=104", "rollout.context_tokens=192"]
ROWS = ["trainer.row_tokens=[192]", "trainer.microbatch_tokens=768"]


def read_samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"samples/step-{step:06d}.jsonl").read_text().splitlines()]


def check_samples(run_dir: Path, steps: int) -> list[dict]:
    """What was trained on is what the engine wrote, to the token; all samples."""
    samples = []
    for step, row in enumerate(read_rows(run_dir)):
        assert row["train/logprob_diff_max"] < 1e-4
        assert row["rollout/staleness_max"] == 0
        written = read_samples(run_dir, step)
        assert row["train/loss_tokens"] == sum(sum(sample["loss_mask"]) for sample in written)
        for sample in written:
            # Runs of the policy's tokens are the turns, and each of them was written under this step's policy.
            runs = [list(run) for mask, run in groupby(enumerate(sample["loss_mask"]), lambda pair: pair[1]) if mask]
            turns = [(run[0][0], run[-1][0] + 1) for run in runs]
            assert turns == [(turn["start"], turn["end"]) for turn in sample["turns"] if turn["end"] > 0]
            spans = [(span["start"], span["end"]) for span in sample["spans"] if span["end"] > 0]
            assert spans == turns
            assert {span["version"] for span in sample["spans"]} == {step}
        samples += written
    assert len(read_rows(run_dir)) == steps
    return samples


def test_a_moody_agent_trains(start_job, tmp_path):
    """Samples without a token, whole groups of them, errors and time-outs: the step goes on with the rest."""
    run_dir = tmp_path / "run"
    options = ["environment.options.agent=job_agents:moody", "environment.options.timeout_s=4"]
    job = start_job(
        f"run_dir={run_dir}",
        *ENVIRONMENT,
        *ROWS,
        *options,
        "rollout.samples_per_prompt=4",
        "environment.options.failure_reward=-1",
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    samples = check_samples(run_dir, steps=2)
    ends = {sample["finish_reason"] for sample in samples}
    assert ends >= {"error", "time"}
    assert {len(sample["turns"]) for sample in samples if sum(sample["loss_mask"])} == {1, 2}
    empty = [sample for sample in samples if not sample["response_ids"]]
    assert empty
    assert all(sample["reward"] in (0, -1) for sample in empty)
    for sample in samples:
        assert sample["reward_parts"].get("environment", 0) == -(sample["finish_reason"] in ("error", "time"))
    groups = [list(group) for _, group in groupby(samples, lambda sample: sample["group"])]
    assert any(not sample["response_ids"] for group in groups for sample in group)
    assert any(all(not sample["response_ids"] for sample in group) for group in groups)
    assert sum(sample["measures"]["other_conversations"] for sample in samples) > 0
    row = read_rows(run_dir)[0]
    assert 0 < row["environment/failed"] < 1
    assert 0 < row["environment/over_time"] < 1
    assert row["environment/template_mismatch"] == 0
    assert "the agent failed on prompt" in output
    assert "KeyError: 'no such thing'" in output
    assert "asked for temperature other than the run's" in output


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    """From the quickstart's policy, with the agent and the settings as they are."""
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", *ENVIRONMENT, *ROWS, "trainer.steps=40", "evaluation.every_steps=0"]
    job = Job([*overrides, "environment.options.agent=examples.openai_agent.agent:solve"], Path.cwd())
    code, output = job.finish(1500)
    assert code == 0, output
    check_samples(run_dir, steps=40)
    change = json.loads((run_dir / "summary.json").read_text())["evaluation"]["held_out"]["reward_mean"]
    assert change["after"] > change["before"] + 0.3
