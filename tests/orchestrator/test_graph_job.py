"""The quickstart with captured programs: engines, checkpoints and metrics do not notice, and nothing is captured again."""

from __future__ import annotations

import pytest
from jobs import read_rows

SETTINGS = [
    "trainer.steps=12",
    "evaluation=none",
    "trainer.execution.mode=graph",
    "trainer.execution.max_compilations=3",
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_runs_programs(ranks, start_job, tmp_path):
    run_dir = tmp_path / "run"
    chips = [f"cluster.chips_per_host={1 + ranks}", f"cluster.trainer_chips={ranks}", "cluster.cpus_per_chip=0.5"]
    job = start_job(f"run_dir={run_dir}", *SETTINGS, *chips, "weight_sync.check_engine_weights=true")
    code, output = job.finish(1500)
    assert code == 0, output
    assert job.left_behind() == []
    rows = read_rows(run_dir)
    assert [row["train/compilations"] for row in rows] == [2] + [0] * 11, "backward and update"
    assert len({row["train/tokens"] for row in rows}) > 6, "lengths differ from step to step"
    for row in rows:
        assert (row["sync/checked_engines"], row["sync/failed_engines"]) == (1, 0)
        assert row["train/logprob_diff_mean"] < 1e-3
        assert row["train/skipped_updates"] == 0
    assert (run_dir / "final" / "model.safetensors").is_file()
