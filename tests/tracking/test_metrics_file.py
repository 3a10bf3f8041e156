"""metrics.jsonl and evaluations.jsonl: strict, one row per step, whole after a kill, loud when not writable."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from rl_tpu.errors import RunError, UserError


@contextmanager
def no_file_beyond(size):
    """The kernel refuses to let any file of this process grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def strict(text):
    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(path):
    return [strict(line) for line in path.read_text().splitlines()]


def test_rows_are_strict_json_and_say_what_was_not_finite(open_tracker, tmp_path):
    with open_tracker() as tracker:
        values = {"a": 1.5, "b": math.nan, "c": -math.inf, "d": torch.tensor(2.0), "e": True, "f": 7}
        tracker.log(0, {f"train/{name}": value for name, value in values.items()})
        assert len(rows(tmp_path / "run/metrics.jsonl")) == 1  # on disk before the run goes on
    (row,) = rows(tmp_path / "run/metrics.jsonl")
    assert row == {
        "step": 0,
        "train/a": 1.5,
        "train/b": None,
        "train/c": None,
        "train/d": 2.0,
        "train/e": 1.0,
        "train/f": 7,
        "non_finite": {"train/b": "nan", "train/c": "-inf"},
    }
    summary = strict((tmp_path / "run/summary.json").read_text())
    assert summary["final_metrics"]["train/b"] is None


WRITER = """
import os, signal, sys
from pathlib import Path
from rl_tpu.tracking import Tracker
sys.path.insert(0, {tests!r})
from conftest import run_config
tracker = Tracker.open(run_config(), Path({run!r}), total_steps=4)
tracker.evaluation(0, 0, {{"sums": {{"pass@1": 0.25}}}})
for step in range(3):
    with tracker.timer("step"):
        pass
    tracker.log(step, {{"reward/mean": step}})
tracker.evaluation(3, 3, {{"sums": {{"pass@1": 0.5}}}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_resumes_with_every_step_once(open_tracker, tmp_path):
    run = tmp_path / "run"
    code = WRITER.format(tests=os.path.dirname(__file__), run=str(run))
    killed = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [0, 1, 2]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')  # the kill came in the middle of a line
    killed_timeline = (run / "timeline.json").read_text()
    assert not killed_timeline.rstrip().endswith("]")

    with open_tracker(start_step=2) as tracker:  # the checkpoint was taken after step 1
        assert [row["step"] for row in rows(run / "metrics.jsonl")] == [0, 1]
        tracker.evaluation(2, 2, {"sums": {"pass@1": 0.375}})
        for step in (2, 3):
            tracker.log(step, {"reward/mean": 10 * step})
        tracker.evaluation(4, 4, {"sums": {"pass@1": 1.0}})
    assert [(row["step"], row["reward/mean"]) for row in rows(run / "metrics.jsonl")] == [
        (0, 0),
        (1, 1),
        (2, 20),
        (3, 30),
    ]
    evaluations = [(row["step"], row["version"], row["eval/sums/pass@1"]) for row in rows(run / "evaluations.jsonl")]
    assert evaluations == [(0, 0, 0.25), (2, 2, 0.375), (4, 4, 1.0)]
    summary = strict((run / "summary.json").read_text())
    assert summary["evaluation"]["sums"]["pass@1"] == {"before": 0.25, "after": 1.0, "change": 0.75}
    timeline = strict((run / "timeline.json").read_text())
    assert [event["args"]["step"] for event in timeline if event["ph"] == "X"] == [0, 1, 2]


def test_an_evaluation_that_is_repeated_replaces_the_first(open_tracker, tmp_path):
    with open_tracker() as tracker:
        tracker.evaluation(0, 0, {"sums": {"pass@1": 0.1}})
        tracker.evaluation(0, 0, {"sums": {"pass@1": 0.2}})
    assert [row["eval/sums/pass@1"] for row in rows(tmp_path / "run/evaluations.jsonl")] == [0.2]


def test_a_step_is_logged_once(open_tracker):
    with open_tracker() as tracker:
        tracker.log(1, {})
        with pytest.raises(ValueError, match="step 1 was logged after step 1"):
            tracker.log(1, {})


def test_a_full_disk_under_metrics_ends_the_run_and_still_leaves_a_summary(open_tracker, tmp_path):
    def run():
        with open_tracker() as tracker:
            tracker.log(0, {"reward/mean": 0.5})
            with no_file_beyond((tmp_path / "run/metrics.jsonl").stat().st_size + 10):
                tracker.log(1, {"reward/mean": 0.6})

    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl \(File too large\)"):
        run()
    summary = strict((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed"
    assert "File too large" in summary["error"]
    with open_tracker(start_step=1) as tracker:  # the half row that still fitted does no harm
        tracker.log(1, {"reward/mean": 0.7})
    assert [row["reward/mean"] for row in rows(tmp_path / "run/metrics.jsonl")] == [0.5, 0.7]


def test_a_broken_row_is_named(open_tracker, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: not a JSON object"):
        open_tracker(start_step=3)


def test_an_unwritable_run_directory_is_an_error(config, tmp_path):
    from rl_tpu.tracking import Tracker

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write into"):
        Tracker.open(config(), tmp_path / "file" / "run", total_steps=1)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "interrupted"), (ValueError("bad"), "failed")])
def test_a_run_that_ends_badly_says_how(open_tracker, tmp_path, error, status):
    with pytest.raises(type(error)), open_tracker() as tracker:  # noqa: PT012
        tracker.log(0, {"reward/mean": 1.0})
        raise error
    summary = strict((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == status
    assert summary["error"].startswith(type(error).__name__)
    assert summary["steps"] == 1
