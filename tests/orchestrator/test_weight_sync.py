"""Jobs that carry policies in other ways than the default, and through what breaks on the way."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from jobs import MARK, read_rows


@pytest.mark.parametrize(
    ("transport", "pause_mode", "delivery"),
    [
        ("disk_delta", "in_place", "staged"),
        pytest.param("ici", "abort", "staged", marks=pytest.mark.slow),
        pytest.param("ici", "in_place", "broadcast", marks=pytest.mark.slow),
        pytest.param("ici", "abort", "broadcast", marks=pytest.mark.slow),
        pytest.param("disk", "retract", "staged", marks=pytest.mark.slow),
    ],
)
def test_policies_arrive_while_answers_are_written(start_job, tmp_path, transport, pause_mode, delivery):
    """Every engine's checksums equal the trainer's after every sync, with answers in flight over the syncs."""
    run_dir = tmp_path / "run"
    pacing = ["trainer.steps=4", "rollout.max_staleness=1"]
    sync = [f"weight_sync={transport}", f"weight_sync.pause_mode={pause_mode}", f"weight_sync.delivery={delivery}"]
    ranks = ["cluster.chips_per_host=4", "cluster.trainer_chips=2", "cluster.rollout_chips=2", "rollout.engines=2"]
    job = start_job(f"run_dir={run_dir}", *sync, "cluster.cpus_per_chip=0.25", *pacing, *ranks)
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["sync/checked_engines"] == 2
        assert (row["sync/failed_engines"], row["sync/reloaded_engines"]) == (0, 0)
        assert row["sync/verified_tensors"] > 20
        assert 0 < row["sync/pause_s"] < row["sync/total_s"]
        assert (row["sync/receive_s"] > 0) == (delivery == "staged")
        assert row["sync/stage_s"] == pytest.approx(row["sync/publish_s"] + row["sync/receive_s"])
        assert pause_mode == "abort" or row["sync/aborted_requests"] == 0
        assert ("sync/wire_bytes" in row) == transport.startswith("disk")
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert (run_dir / "weights").exists() == transport.startswith("disk")


def test_a_damaged_policy_and_a_killed_engine(start_job, tmp_path):
    """Of the only engine: the policy is published again, the engine is started anew, and the run goes on."""
    run_dir = tmp_path / "run"
    settings = ["trainer.steps=8", "rollout.max_staleness=1", "weight_sync.transport=damaging_transport:TRANSPORT"]
    job = start_job(f"run_dir={run_dir}", *settings, environment={"PYTHONPATH": str(Path(__file__).parent)})
    job.wait_for_steps(run_dir, 3)
    (scheduler,) = [process for process in psutil.process_iter(["name", "environ"]) if is_scheduler(process, job)]
    scheduler.kill()
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(8))
    assert all(row["sync/checked_engines"] == 1 for row in rows)
    # The row of step s ends with the sync of version s + 1.
    assert [row["sync/failed_engines"] for row in rows[:3]] == [0, 1, 0]
    assert [row["sync/reloaded_engines"] for row in rows[:3]] == [0, 1, 0]


def is_scheduler(process: psutil.Process, job) -> bool:
    mine = (process.info["environ"] or {}).get(MARK) == job.mark
    return mine and "scheduler" in " ".join([process.info["name"], *process.cmdline()])
