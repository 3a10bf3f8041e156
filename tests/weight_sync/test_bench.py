"""The bench as its users run it: real senders and receivers, all transports, a few megabytes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from weight_sync.bench import processes, transfer
from weight_sync.bench.__main__ import main
from weight_sync.bench.payload import Payload, PrivateShards, add_sums, sums

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "weight_sync"
REQUIRED = {"transport", "payload_bytes", "senders", "receivers", "total_s", "pause_s", "gb_per_s", "verified"}

WRONG = """
from weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from weight_sync.transport import Transport

class Careless(SharedMemoryReceiver):
    def __init__(self, **options):
        super().__init__(**options)
        self.kept = None

class Swapping(Careless):
    def receive(self, handle):
        received = super().receive(handle)
        received.tensors["layers.0.weight"][7, 3] += 1
        return received

class Late(Careless):
    def receive(self, handle):
        received = super().receive(handle)
        now = {name: tensor.clone() for name, tensor in received.tensors.items()}
        received.tensors, self.kept = self.kept or now, now
        return received

class Silent(Careless):
    def receive(self, handle):
        import time
        time.sleep(3600)

SWAPPING, LATE, SILENT = (Transport(SharedMemorySender, kind) for kind in (Swapping, Late, Silent))
"""


def left_behind(directory: Path) -> list[str]:
    """Files of the bench."""
    return [path.name for path in (*directory.iterdir(), *Path("/dev/shm").glob("weight_sync*bench-*"))]


@pytest.fixture
def place(tmp_path):
    """Where disk transports write; nothing stays there."""
    directory = tmp_path / "place"
    directory.mkdir()
    yield directory
    assert left_behind(directory) == []


def rows_of(path: Path) -> list[dict]:
    rows = json.loads(path.read_text())
    for row in rows:
        assert REQUIRED | {"memcpy_gb_per_s"} <= row.keys()
        if "error" not in row:
            assert row["gb_per_s"] == pytest.approx(row["payload_bytes"] / 1e9 / row["total_s"])
            assert 0 < row["min_s"] <= row["total_s"] <= row["max_s"]
            if row["ratio_to_memcpy"] is not None:
                assert row["ratio_to_memcpy"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
    return rows


@pytest.mark.parametrize("receivers", [[2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_every_transport_with_one_and_two_senders(tmp_path, place, receivers):
    command = [sys.executable, "-m", "weight_sync.bench", "--payload", "6MB", "--repeats", "2"]
    command += ["--transport", "shm,disk,disk_delta,ici", "--senders", "1,2"]
    command += ["--receivers", ",".join(map(str, receivers))]
    command += ["--directory", str(place), "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    rows = rows_of(tmp_path / "out.json")
    limits = [row["transport"] for row in rows if row["kind"] == "limit"]
    assert limits == ["memcpy, 1 thread", "memcpy, 2 threads", "memcpy, first touch", "xxh3-128, 1 thread",
                      "disk write and fsync", "gloo broadcast"]  # fmt: skip
    measured = [row for row in rows if row["kind"] == "transport"]
    memory = [("shared_memory", "none"), ("shared_memory", "inline"), ("shared_memory", "ahead")]
    others = [("disk", "inline"), ("disk_delta", "inline"), ("ici", "inline")]
    assert [(row["senders"], row["receivers"], row["transport"], row["hashing"]) for row in measured] == [
        (senders, count, *kind)
        for senders, kinds in ((1, memory + others), (2, memory[:2] + others))  # rows cannot be hashed ahead
        for count in receivers
        for kind in kinds
    ]
    for row in measured:
        assert row["payload_bytes"] == 6_000_640  # to the row of 2 KiB
        assert row["verified"] == (row["hashing"] != "none")
        assert row["total_s"] == pytest.approx(row["stage_s"] + row["receive_s"], rel=1.0)  # medians of two rounds
        assert row["pause_s"] > 0
        assert row["ratio_to_memcpy"] > 0
        peaks = row["peak_rss_bytes"]
        assert [len(peaks["senders"]), len(peaks["receivers"])] == [row["senders"], row["receivers"]]
        assert min(peaks["senders"] + peaks["receivers"]) > row["payload_bytes"] / 2
    wire = {(row["transport"], row["senders"]): row["wire_bytes"] for row in measured if "wire_bytes" in row}
    for senders in (1, 2):
        assert wire["disk_delta", senders] < 0.2 * wire["disk", senders]
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(rows)
    assert all(f"{row['gb_per_s']:.2f}" in line for row, line in zip(rows, lines[1:], strict=True))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    (tmp_path / "wrong_transports.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("wrong_transports", None)


@pytest.mark.parametrize(("kind", "said"), [
    ("SWAPPING", r"receiver 0 has not got what was sent in round 1: 1 of 2 tensors differ, layers.0.weight first"),
    ("LATE", r"receiver 0 has not got what was sent in round 2: 2 of 2 tensors differ, layers.0.weight first"),
])  # fmt: skip
def test_wrong_bytes_fail_the_bench_and_the_other_rows_are_there(wrong, tmp_path, place, capsys, kind, said):
    options = ["--payload", "6MB", "--repeats", "1", "--no-limits", "--directory", str(place)]
    options += ["--transport", f"wrong_transports:{kind},shm", "--json", str(tmp_path / "out.json")]
    assert main(options) == 1
    first, *others = rows_of(tmp_path / "out.json")
    assert first["error"] == said
    assert first["verified"] is False
    assert first["total_s"] is None
    assert [row["transport"] for row in others] == ["shared_memory"] * 3
    assert not any("error" in row for row in others)
    assert said in capsys.readouterr().out


def test_a_transport_that_never_answers_is_given_up(wrong, tmp_path, place, monkeypatch):
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", 2)

    def impatient(workers, timeout_s, function, *args):
        return processes.on_all(workers, 1 if function is transfer.receive else timeout_s, function, *args)

    monkeypatch.setattr(transfer, "on_all", impatient)
    options = ["--payload", "1MB", "--repeats", "1", "--no-limits", "--directory", str(place)]
    options += ["--transport", "wrong_transports:SILENT", "--json", str(tmp_path / "out.json")]
    assert main(options) == 1
    assert rows_of(tmp_path / "out.json")[0]["error"] == "receiver 0 did not answer in time"


def test_ended_from_outside_it_leaves_nothing(tmp_path, place):
    command = [sys.executable, "-m", "weight_sync.bench", "--payload", "20MB", "--repeats", "100000", "--no-limits"]
    command += ["--transport", "shm", "--directory", str(place)]
    bench = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(name.startswith("weight_sync.bench-") for name in left_behind(place)):
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(60) == 143


def test_the_example_transport(tmp_path, place):
    options = ["--payload", "6MB", "--repeats", "1", "--no-limits", "--directory", str(place), "--senders", "2"]
    options += ["--transport", "examples.weight_sync.one_file_transport:TRANSPORT"]
    assert main([*options, "--json", str(tmp_path / "out.json")]) == 0
    (row,) = rows_of(tmp_path / "out.json")
    assert row["verified"]


def measure_baselines(tmp_path: Path, place: Path, payload: str, source: str) -> dict[str, dict]:
    options = ["--payload", payload, "--repeats", "1", "--no-limits", "--transport", "none", "--directory", str(place)]
    assert main([*options, "--baselines", source, "--json", str(tmp_path / "out.json")]) == 0
    rows = rows_of(tmp_path / "out.json")
    for row in rows:
        assert row["kind"] == "baseline"
        assert row["ours_speedup"] == pytest.approx(row["total_s"] / row["ours_s"])
        assert row["ratio_to_memcpy"] > 0
    return {row["transport"]: row for row in rows}


def test_baselines_through_files(tmp_path, place):
    rows = measure_baselines(tmp_path, place, "6MB", f"{EXAMPLES / 'baselines.py'}:/dev/shm")
    assert list(rows) == ["safetensors in /dev/shm", "torch.save in /dev/shm"]


@pytest.mark.slow
def test_baselines_through_ray(tmp_path, place):
    rows = measure_baselines(tmp_path, place, "6MB", f"{EXAMPLES / 'baselines.py'}:ray")
    assert list(rows) == ["ray.put, numpy arrays", "ray actor argument, torch tensors"]


@pytest.mark.slow
def test_updates_through_sglang(tmp_path, place):
    rows = measure_baselines(tmp_path, place, "qwen3_tiny", str(EXAMPLES / "through_sglang.py"))
    assert [row["verified"] for row in rows.values()] == [True, True, False]
    assert all(0 < row["pause_s"] <= row["total_s"] for row in rows.values())


@pytest.mark.parametrize(("options", "said"), [
    (["--payload", "qwen4"], "payload 'qwen4' is neither one of qwen3_tiny, qwen3_0_6b, qwen3_4b nor a size such as 100MB"),
    (["--transport", "smh"], "unknown weight transport 'smh'"),
    (["--transport", "nowhere:TRANSPORT"], "cannot be imported from nowhere:TRANSPORT"),
    (["--senders", "1,x"], "numbers of processes must be given as in 1,2, not '1,x'"),
    (["--receivers", "0"], "numbers of processes must be given as in 1,2, not '0'"),
    (["--directory", "/nowhere"], "--directory /nowhere: /nowhere is not a directory"),
    (["--json", "/nowhere/out.json"], "--json /nowhere/out.json: /nowhere is not a directory"),
    (["--baselines", "nowhere.py"], "there is no file nowhere.py"),
    (["--baselines", f"{EXAMPLES / 'baselines.py'}:pigeon"], "has no baseline with 'pigeon' in its name"),
    (["--changed", "2"], "--changed must lie between 0 and 1"),
])  # fmt: skip
def test_wrong_arguments_are_one_line(capsys, options, said):
    with pytest.raises(SystemExit) as exit_code:
        main(options)
    assert exit_code.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# --- the payload ---


@pytest.mark.parametrize(("name", "gigabytes", "tensors"), [("qwen3_0_6b", 1.503, 311), ("qwen3_4b", 8.045, 398)])
def test_named_payloads_have_the_models_sizes(name, gigabytes, tensors):
    payload = Payload.parse(name, changed=0.01)
    assert payload.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.001)
    assert len(payload.shapes) == tensors


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_make_up_the_payload_and_every_round_changes_all_of_it(world_size):
    payload = Payload.parse("qwen3_tiny", changed=0.01)
    ranks = [PrivateShards(payload, rank, world_size) for rank in range(world_size)]
    before = None
    for number in (1, 2, 3):
        of_ranks = [rank.change(number) for rank in ranks]
        whole = {name: torch.cat([r.tensors[name] for r in ranks if name in r.tensors]) for name in payload.shapes}
        assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == payload.shapes
        assert sums(whole) == add_sums(of_ranks)
        if before is not None:
            assert all(sums(whole)[name] != sums(before)[name] for name in whole)
            changed = sum(int((whole[n].view(torch.int16) != before[n].view(torch.int16)).sum()) for n in whole)
            assert changed * 2 / payload.nbytes == pytest.approx(0.01, rel=0.2)
        before = {name: tensor.clone() for name, tensor in whole.items()}
