"""TensorBoard, wandb, samples, curves: read back with their own readers, resumed, and broken."""

import contextlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys

import psutil
import pytest

from rl_tpu.tracking import RunDirectory
from rl_tpu.tracking.curves import draw_curves


def scalars(folder):
    """{tag: {step: value}} as TensorBoard's own reader sees the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_step_once_after_a_resume(open_tracker, tmp_path):
    with open_tracker(tensorboard=True) as tracker:
        tracker.evaluation(0, 0, {"sums": {"pass@1": 0.25}})
        for step in range(3):
            tracker.log(step, {"reward/mean": step})
    with open_tracker(start_step=2, tensorboard=True) as tracker:
        for step in (2, 3):
            tracker.log(step, {"reward/mean": 10.0 * step})
    read = scalars(tmp_path / "run/tensorboard")
    assert read["reward/mean"] == [(0, 0), (1, 1), (2, 20), (3, 30)]
    assert read["eval/sums/pass@1"] == [(0, 0.25)]


def wandb_records(run_dir):
    """The records of each of the run's .wandb files, oldest first (LevelDB log format behind a header of 7 bytes)."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service process writes the end of a file after `finish` has returned
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        data, position, payload, records = path.read_bytes(), 7, b"", []
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            payload += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # whole, or the last part
                records.append(Record.FromString(payload))
                payload = b""
        yield records


def history(records, name):
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if name in items:
                rows.append((items["step"], items[name]))
    return rows


def test_wandb_offline_holds_the_run_and_a_resume_continues_its_id(open_tracker, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with open_tracker(wandb={"mode": "offline", "project": "sums"}) as tracker:
        tracker.evaluation(0, 0, {"sums": {"pass@1": 0.25}})
        tracker.log(0, {"reward/mean": 0.5})
    with open_tracker(start_step=1, wandb={"mode": "offline", "project": "sums"}) as tracker:
        tracker.log(1, {"reward/mean": 0.75})
    first, second = wandb_records(tmp_path / "run")
    assert history(first, "reward/mean") == [(0, 0.5)]
    assert history(first, "eval/sums/pass@1") == [(0, 0.25)]
    assert history(second, "reward/mean") == [(1, 0.75)]
    runs = [next(record.run for record in records if record.HasField("run")) for records in (first, second)]
    assert runs[0].run_id == runs[1].run_id == (tmp_path / "run/wandb/run_id").read_text()
    assert {run.project for run in runs} == {"sums"}
    config = {update.key: update.value_json for update in runs[0].config.update}
    assert json.loads(config["rollout"])["prompts_per_step"] == 2


ONLINE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import run_config
from rl_tpu.tracking import Tracker, wandb
wandb.START_TIMEOUT_S = 2.0
with Tracker.open(run_config(wandb={{"mode": "online"}}), Path({run!r}), total_steps=1) as tracker:
    tracker.log(0, {{"reward/mean": 0.5}})
"""


def run_online(tmp_path, **environment):
    """A run in a process of its own, because wandb keeps credentials and its server's address for the whole process."""
    code = ONLINE.format(tests=os.path.dirname(__file__), run=str(tmp_path / "run"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    # Nothing listens on the port while it is bound here, so every connection is refused.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{bound.getsockname()[1]}"
        environment |= {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": server, "WANDB_ERROR_REPORTING": "false"}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=inherited | environment, timeout=120, capture_output=True, text=True)


def test_wandb_online_without_credentials_is_told_at_once(tmp_path):
    ended = run_online(tmp_path)
    assert ended.returncode == 1
    assert "UserError: tracking.wandb.mode=online: no credentials; set WANDB_API_KEY" in ended.stderr


def test_an_unreachable_wandb_is_one_warning(tmp_path):
    ended = run_online(tmp_path, WANDB_API_KEY="0" * 40)
    assert ended.returncode == 0, ended.stderr
    (warning,) = [line for line in ended.stderr.splitlines() if line.startswith("tracking:")]
    assert warning.startswith("tracking: wandb is switched off for the rest of the run (CommError")
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


FROZEN = """
import sys
from pathlib import Path
import psutil
sys.path.insert(0, {tests!r})
from conftest import run_config
from rl_tpu.tracking import Tracker, wandb
wandb.FINISH_TIMEOUT_S = wandb.SERVICE_TIMEOUT_S = 3.0
with Tracker.open(run_config(wandb={{"mode": "offline"}}), Path({run!r}), total_steps=1) as tracker:
    tracker.log(0, {{"reward/mean": 0.5}})
    (service,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    service.suspend()
    tracker.directory.path.joinpath("service").write_text(str(service.pid))
"""


def test_a_wandb_that_hangs_does_not_keep_the_run_from_ending(tmp_path):
    code = FROZEN.format(tests=os.path.dirname(__file__), run=str(tmp_path / "run"))
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (warning,) = [line for line in ended.stderr.splitlines() if line.startswith("tracking:")]
    assert "wandb is switched off for the rest of the run (TimeoutError: its service does not answer" in warning
    service = int((tmp_path / "run/service").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(service).wait(timeout=10)  # it was killed, but need not be gone yet


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_hold_everything_a_reader_or_a_replay_needs(open_tracker, tmp_path, sample, group):
    odd = sample(0.0, response=2, versions=((3, 0, 1), (4, 1, 2)), finish="length", error="timed out after 10 s")
    odd.text, odd.logprobs, odd.advantage = "half a sign \udcf0 and a ∑", [-0.1, float("-inf")], -1.0
    right = sample(1.0, parts={"accuracy": 1.0})
    with open_tracker() as tracker:
        tracker.samples(12, [group(5, [right, odd])])
    first, second = rows(tmp_path / "run/samples/step-000012.jsonl")
    assert first == {
        "step": 12,
        "group": 5,
        "sample": 0,
        "id": "",
        "prompt_id": "sums/5",
        "messages": [{"role": "user", "content": "2+2?"}],
        "answer": "4",
        "response": "four",
        "reward": 1.0,
        "reward_parts": {"accuracy": 1.0},
        "reward_error": None,
        "advantage": 0.0,
        "finish_reason": "stop",
        "spans": [{"version": 0, "start": 0, "end": 3}],
        "turns": [],
        "measures": {},
        "cached_prompt_tokens": 0,
        "prompt_ids": [0, 1],
        "response_ids": [10, 11, 12],
        "loss_mask": [1, 1, 1],
        "logprobs": [-0.5, -0.5, -0.5],
    }
    assert second["response"] == odd.text
    assert second["logprobs"] == [-0.1, None]
    assert (second["reward_error"], second["finish_reason"]) == ("timed out after 10 s", "length")
    assert [span["version"] for span in second["spans"]] == [3, 4]


def test_samples_of_repeated_steps_are_removed_and_none_written_when_off(open_tracker, tmp_path, sample, group):
    with open_tracker() as tracker:
        for step in range(3):
            tracker.samples(step, [group(step, [sample(1.0)])])
    with open_tracker(start_step=1):
        assert [path.name for path in (tmp_path / "run/samples").iterdir()] == ["step-000000.jsonl"]
    with open_tracker(start_step=1, samples=False) as tracker:
        tracker.samples(1, [group(1, [sample(1.0)])])
    assert not (tmp_path / "run/samples/step-000001.jsonl").exists()


def test_a_full_disk_under_samples_is_one_warning_and_the_run_goes_on(open_tracker, tmp_path, sample, group, caplog):
    with open_tracker() as tracker:
        (tmp_path / "run/samples/step-000000.jsonl.tmp").symlink_to("/dev/full")  # every write fails with ENOSPC
        for step in range(2):
            tracker.samples(step, [group(step, [sample(1.0)])])
            tracker.log(step, {"reward/mean": 1.0})
    assert [record.message for record in caplog.records] == [
        "tracking: sample dump is switched off for the rest of the run (OSError: [Errno 28] No space left on device)"
    ]
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 2
    assert not (tmp_path / "run/samples/step-000001.jsonl").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer thread
def test_a_full_disk_under_tensorboard_is_one_warning_and_the_run_goes_on(open_tracker, tmp_path, caplog):
    with open_tracker(tensorboard=True) as tracker:
        tracker.log(0, {"reward/mean": 1.0})
        (event_file,) = (tmp_path / "run/tensorboard").iterdir()
        event_file.unlink()
        event_file.symlink_to("/dev/full")  # every write fails with ENOSPC
        for step in range(1, 4):
            tracker.log(step, {"reward/mean": 1.0})
    ours = [record.message for record in caplog.records if record.name == "rl_tpu.tracking"]
    assert ours == [
        "tracking: TensorBoard is switched off for the rest of the run (OSError: [Errno 28] No space left on device)"
    ]
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 4


def test_curves_are_drawn_at_1200_pixels_and_show_what_was_recorded(open_tracker, tmp_path):
    import matplotlib.image

    directory = RunDirectory(tmp_path / "run")
    with open_tracker(plot_metrics=["rollout/staleness_mean"]) as tracker:
        tracker.evaluation(0, 0, {"sums": {"pass@1": 0.25}})
        assert not directory.curves.exists()
        for step in range(3):
            tracker.log(step, {"reward/mean": step, "train/grad_norm": float("nan"), "rollout/staleness_mean": 1})
        tracker.evaluation(3, 3, {"sums": {"pass@1": 0.5}})
        assert directory.curves.exists()  # also while the run goes
    image = matplotlib.image.imread(directory.curves)
    assert image.shape[1] == 1200

    def ink(picture):
        return float((picture[..., :3].min(axis=2) < 0.9).mean())

    with_curves = ink(image)
    directory.metrics.write_text("")
    directory.evaluations.write_text("")
    draw_curves(directory, ["rollout/staleness_mean"])
    without = matplotlib.image.imread(directory.curves)
    assert without.shape == image.shape
    assert with_curves > ink(without) + 0.002  # lines were drawn, not only axes


def test_curves_of_a_long_run_with_every_metric(tmp_path):
    names = [
        "reward/mean",
        "reward/std",
        "rollout/solve_all",
        "train/logprob_diff_mean",
        "perf/generate_s",
        "perf/step_s",
    ]
    lines = [json.dumps({"step": step, **{name: 0.1 + step % 3 for name in names}}) for step in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert draw_curves(RunDirectory(tmp_path)).stat().st_size > 20_000


def test_no_sink_leaves_log_handlers_behind(open_tracker):
    before = list(logging.getLogger().handlers)
    with open_tracker() as tracker:
        tracker.log(0, {})
    assert list(logging.getLogger().handlers) == before
