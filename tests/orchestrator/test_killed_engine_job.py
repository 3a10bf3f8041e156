"""kill -9 of one of two engines while a job is in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from jobs import MARK, read_rows

STEPS, PROMPTS, SAMPLES = 6, 8, 4


@pytest.mark.slow
def test_one_of_two_engines_is_killed_in_mid_step(start_job, tmp_path):
    """All steps are taken, no sample is lost or there twice, what was half written is gone on with."""
    run_dir = tmp_path / "run"
    rollout = {
        "engines": 2,
        "max_staleness": 1,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_response_tokens": 400,
        "context_tokens": 512,
    }
    settings = [f"rollout.{name}={value}" for name, value in rollout.items()]
    settings += ["cluster.chips_per_host=3", "cluster.rollout_chips=2", "cluster.cpus_per_chip=0.25"]
    job = start_job(f"run_dir={run_dir}", f"trainer.steps={STEPS}", "trainer.row_tokens=[512]", *settings)
    job.wait_for_steps(run_dir, 2)
    time.sleep(0.3)  # the groups that were drawn at the end of the step are being written
    for process in server_of(job, "engine-0"):
        os.kill(process, signal.SIGKILL)
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    assert "engine 0 gets no more requests" in output

    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert sum(row["rollout/resumed_samples"] for row in rows) > 0
    assert sum(row["rollout/reused_tokens"] for row in rows) > 0
    checked = [row["sync/checked_engines"] for row in rows]  # engines that hold exactly the trainer's policy
    assert checked[:2] == [2, 2]
    assert min(checked) == 1
    ids = []
    for step in range(STEPS):
        samples = [json.loads(line) for line in (run_dir / "samples" / f"step-{step:06d}.jsonl").open()]
        for sample in samples:
            spans = sample["spans"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert spans[-1]["end"] == len(sample["response_ids"]) == len(sample["logprobs"])
            assert 0 <= step - spans[0]["version"] <= 1
        assert len(samples) == PROMPTS * SAMPLES
        ids += [sample["id"] for sample in samples]
    expected = {f"{group}-{number}" for group in range(STEPS * PROMPTS) for number in range(SAMPLES)}
    assert len(ids) == len(expected)
    assert set(ids) == expected


def server_of(job, engine: str) -> list[int]:
    """All processes of an engine's server: the session of the one whose output is the engine's log."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        mine = (process.info["environ"] or {}).get(MARK) == job.mark
        server = "rl_tpu.rollout.server" in (process.info["cmdline"] or [])
        if mine and server and engine in os.readlink(f"/proc/{process.pid}/fd/1"):
            session = os.getsid(process.pid)
            return [other for other in psutil.pids() if _session(other) == session]
    raise AssertionError(f"{engine} does not run")


def _session(process: int) -> int | None:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return None
