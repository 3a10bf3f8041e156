"""Jobs whose trainer ranks share the policy in other ways than the default, with engines that hold what they publish."""

from __future__ import annotations

import pytest
from jobs import SHORT, read_rows

REFERENCE = ["algorithm.kl.coefficient=0.05", "algorithm.kl.refresh_steps=1", "trainer.offload_reference=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["trainer.parallel.tensor=2", *REFERENCE], ["trainer.parallel.replicas=2"]],
    ids=["tensor, reference", "replicas"],
)
def test_a_job_on_two_ranks(settings, start_job, tmp_path):
    run_dir = tmp_path / "run"
    chips = ["cluster.chips_per_host=3", "cluster.trainer_chips=2", "cluster.cpus_per_chip=0.5"]
    sync = ["weight_sync.check_engine_weights=true"]
    job = start_job(f"run_dir={run_dir}", *SHORT, *chips, *sync, *settings)
    code, output = job.finish(400)
    assert code == 0, output
    assert job.left_behind() == []
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["sync/checked_engines"], row["sync/failed_engines"]) == (1, 0)
        assert row["train/logprob_diff_mean"] < 0.02
        assert row["train/skipped_updates"] == 0
    if REFERENCE[0] in settings:  # the reference is the policy before each step
        assert rows[1]["train/reference_kl"] == pytest.approx(0, abs=1e-3)
