"""A run that is killed while it writes a checkpoint goes on from the whole one before, and the engine still agrees."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
from jobs import MARK, Job, read_rows

from rl_tpu.rollout.leftovers import held_files


def names(directory: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


def kill_everything(job: Job) -> None:
    """As when the machine is lost: the driver, Ray, engines and trainer ranks at once, without a word."""
    everything = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == job.mark]
    files = set()
    for process in everything:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            files |= held_files(os.getpgid(process.pid))
    for process in everything:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.process.wait()
    for file in files:  # nobody else is left to remove them, and jobs of other tests look for what was left behind
        Path(file).unlink(missing_ok=True)


def test_killed_in_the_middle_of_a_checkpoint(start_job, tmp_path):
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    job = start_job(f"run_dir={run_dir}", "trainer.steps=500", "trainer.checkpoint.every_steps=1")
    job.wait_for(lambda: names(checkpoints, "step-*") and names(checkpoints, ".step-*.partial"))
    kill_everything(job)
    for partial in checkpoints.glob(".step-*.partial"):  # whatever it held, it is not whole
        for data in partial.glob("trainer/*"):
            data.write_bytes(data.read_bytes()[:1000])
    saved = int(names(checkpoints, "step-*")[-1].removeprefix("step-"))

    settings = [f"trainer.steps={saved + 2}", "trainer.checkpoint.export_every_steps=1", "resume=auto"]
    job = start_job(f"run_dir={run_dir}", *settings)
    code, output = job.finish()
    assert code == 0, output
    assert f"continuing after step {saved} from {checkpoints / f'step-{saved:06d}'}" in output
    assert names(checkpoints, ".step-*") == []
    assert names(checkpoints, "step-*")[-1] == f"step-{saved + 2:06d}"
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(saved + 2))
    for row in rows:  # before and after
        assert row["train/logprob_diff_mean"] < 1e-4
        assert row["train/logprob_diff_max"] < 1e-3
        assert row["rollout/version_max"] == row["step"]
    exports = [f"step-{saved + 1:06d}", f"step-{saved + 2:06d}"]
    assert names(run_dir / "exports", "*") == exports
    last, final = (run_dir / name / "model.safetensors" for name in (f"exports/{exports[-1]}", "final"))
    assert last.read_bytes() == final.read_bytes()
    assert job.left_behind() == []
