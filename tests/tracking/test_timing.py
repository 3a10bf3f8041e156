import json
import threading
import time

import pytest

from rl_tpu.tracking.timing import Timer, part_seconds, span_metrics


def test_parts_add_up_per_lap_and_in_total():
    timer = Timer()
    with timer("step"):
        for _ in range(2):
            with timer("generate"):
                time.sleep(0.05)
        with pytest.raises(ValueError, match="x"), timer("train"):
            raise ValueError("x")  # a part that fails has taken its time too
    row = span_metrics(timer.lap())
    assert row["perf/generate_s"] == pytest.approx(0.1, abs=0.08)
    assert row["perf/step_s"] >= row["perf/generate_s"] + row["perf/train_s"]
    assert timer.lap() == []
    with timer("generate"):
        pass
    again = span_metrics(timer.lap())
    assert timer.totals["generate"] == pytest.approx(row["perf/generate_s"] + again["perf/generate_s"])


def test_threads_time_without_losing_spans():
    timer = Timer()

    def work():
        for _ in range(200):
            with timer("reward"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(timer.lap()) == 1600


def test_a_row_gives_its_parts_back():
    row = {
        "step": 3,
        "perf/train_s": 1.0,
        "perf/step_s": 2.0,
        "perf/tokens_per_s": 9.0,
        "perf/sync_s": None,
        "train/a_s": 1,
    }
    assert part_seconds(row) == {"train": 1.0, "step": 2.0}


def test_the_tracker_puts_seconds_in_the_row_and_the_timeline(open_tracker, tmp_path):
    before = time.time()
    with open_tracker() as tracker:
        for step in range(2):
            with tracker.timer("step"), tracker.timer("train"):
                time.sleep(0.02)
            tracker.log(step, {"rollout/total_tokens": 1000})
        with tracker.timer("checkpoint"):
            pass
        summary = tracker.finish({"note": "kept"})
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["perf/step_s"] >= row["perf/train_s"] >= 0.02 for row in rows)
    assert rows[0]["perf/tokens_per_s"] == pytest.approx(1000 / rows[0]["perf/step_s"])
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["note"] == "kept"
    assert summary["seconds"]["train"] == pytest.approx(sum(row["perf/train_s"] for row in rows))
    assert "checkpoint" in summary["seconds"]

    timeline = json.loads((tmp_path / "run/timeline.json").read_text())
    spans = [event for event in timeline if event["ph"] == "X"]
    assert [(event["name"], event["args"]["step"]) for event in spans] == [
        ("train", 0),
        ("step", 0),
        ("train", 1),
        ("step", 1),
        ("checkpoint", 2),
    ]
    assert all(isinstance(event[field], int) for event in spans for field in ("ts", "dur", "pid", "tid"))
    assert before * 1e6 - 1 <= spans[0]["ts"] <= time.time() * 1e6
    names = {event["tid"]: event["args"]["name"] for event in timeline if event["name"] == "thread_name"}
    assert all(names[event["tid"]] == event["name"] for event in spans)


def test_a_resumed_run_sums_the_seconds_of_both_processes(open_tracker):
    for start_step in (0, 1):
        with open_tracker(start_step) as tracker:
            with tracker.timer("train"):
                time.sleep(0.05)
            tracker.log(start_step, {})
            seconds = tracker.finish()["seconds"]["train"]
    assert seconds == pytest.approx(0.1, abs=0.05)
    assert seconds >= 0.1
