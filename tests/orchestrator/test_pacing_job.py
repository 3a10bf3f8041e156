"""A whole job in which some groups take longer than others by steps."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from job_stragglers import steps_late
from jobs import read_rows

STEPS, PER_STEP, STALENESS = 6, 4, 2


def test_late_groups_go_on_over_updates_and_the_latest_are_dropped(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(
        f"run_dir={run_dir}",
        f"trainer.steps={STEPS}",
        *(f"rollout.{name}" for name in (f"prompts_per_step={PER_STEP}", "samples_per_prompt=2")),
        *(f"rollout.{name}" for name in (f"max_staleness={STALENESS}", "oversampling=1.5", "stale_groups=drop")),
        "weight_sync.pause_mode=in_place",
        "environment=multi_turn",
        "environment.options.reply=job_stragglers:late",
        "++environment.options.max_turn_tokens=12",
        "rollout.max_response_tokens=72",
        environment={"PYTHONPATH": str(Path(__file__).parent), "STRAGGLERS_RUN_DIR": str(run_dir)},
    )
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []

    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert max(row["rollout/staleness_max"] for row in rows) <= STALENESS
    assert sum(row["rollout/dropped_stale_groups"] for row in rows) > 0
    assert {row["rollout/stale_share"] for row in rows} == {0}
    assert rows[-1]["rollout/in_flight_groups"] == rows[-1]["rollout/ready_groups"] == 0
    assert max(row["rollout/group_s_max"] for row in rows) > max(row["rollout/group_s_p50"] for row in rows)

    samples = []
    for step, row in enumerate(rows):
        written = [json.loads(line) for line in (run_dir / f"samples/step-{step:06d}.jsonl").read_text().splitlines()]
        assert len(written) == 2 * PER_STEP
        lags = [step - span["version"] for one in written for span in one["spans"] for _ in range(policy(one, span))]
        assert row["rollout/token_staleness_max"] == max(lags)
        assert abs(row["rollout/token_staleness_mean"] - sum(lags) / len(lags)) < 1e-9
        samples += written
    assert len({sample["id"] for sample in samples}) == len(samples)
    mixed = [sample for sample in samples if len({span["version"] for span in sample["spans"]}) > 1]
    assert mixed, "no answer went on under another policy"
    for sample in mixed:
        assert all(a["version"] <= b["version"] and a["end"] <= b["start"] for a, b in pairwise(sample["spans"]))
    assert any(steps_late(sample["prompt_id"]) == 1 for sample in mixed)


def policy(sample: dict, span: dict) -> int:
    """Tokens of the span that the policy wrote."""
    return sum(sample["loss_mask"][span["start"] : span["end"]])
