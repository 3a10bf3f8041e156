"""Engines that do not start, and owners that die: a clear word, and nothing left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from processes import engine_files, gone, session_members
from tiny import make_config

from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.leftovers import held_files, new_files
from rl_tpu.rollout.process import ServerProcess, free_port, last_words


def server_sessions(log: Path) -> list[int]:
    """Sessions of servers that write to a log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd/1") == str(log):
                found.append(int((process / "stat").read_text().rpartition(")")[2].split()[3]))
        except OSError:
            continue
    return sorted(set(found))


def start(run, model_dir, run_dir, engines=1, **rollout):
    config = make_config(model_dir, rollout=rollout)
    return run(Fleet.start(config, model_dir, run_dir, [{"num_cpus": 0}] * engines))


def test_a_directory_without_a_model(run, tmp_path):
    with pytest.raises(UserError, match=r"no Hugging Face model: No such file or directory: .*nowhere/config.json"):
        start(run, tmp_path / "nowhere", tmp_path)


def test_an_argument_that_sglang_does_not_know(local_ray, run, model_dirs, tmp_path):
    with pytest.raises(UserError) as error:
        start(run, model_dirs["tied"], tmp_path, server_options={"pagesize": 3})
    log = tmp_path / "logs" / "engine-0.log"
    assert "engine 0 ended with exit code 2" in str(error.value)
    assert "unrecognized arguments: --pagesize 3" in str(error.value)
    assert f"(log: {log})" in str(error.value)
    assert "rollout.server_options" in str(error.value)
    assert server_sessions(log) == []


def test_weights_that_cannot_be_read(local_ray, run, model_dirs, tmp_path):
    """The scheduler dies of it, in the middle of the start."""
    broken = tmp_path / "broken"
    shutil.copytree(model_dirs["tied"], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    begin = time.time()
    with pytest.raises(
        RunError, match=r"engine 0 ended with exit code \d+: .*[Ee]rror.* \(log: .*engine-0.log\)"
    ) as error:
        start(run, broken, tmp_path)
    assert "\n" not in str(error.value)
    log = tmp_path / "logs" / "engine-0.log"
    assert "safetensors" in log.read_text()
    assert server_sessions(log) == []
    # SGLang had made its shared memory by then; of files made since, only those that a living process uses are left.
    assert new_files(begin) <= held_files()


def test_a_start_that_takes_too_long(local_ray, run, model_dirs, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"engine \d was not up within rollout.start_timeout_s 1 s; its log is .*log"):
        start(run, model_dirs["tied"], tmp_path, engines=2, start_timeout_s=1)
    assert time.monotonic() - begin < 60
    for index in range(2):
        for session in server_sessions(tmp_path / "logs" / f"engine-{index}.log"):
            assert gone(session)


OWNER = """
import sys, time
from pathlib import Path
from rl_tpu.rollout.process import ServerProcess
server = ServerProcess("engine", "127.0.0.1", {"model_path": sys.argv[1]}, {}, Path(sys.argv[2]))
print(server._process.pid, flush=True)
time.sleep(600)
"""


def test_an_owner_that_is_killed_while_the_server_starts(model_dirs, tmp_path):
    arguments = [str(model_dirs["tied"]), str(tmp_path / "engine.log")]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    session = int(owner.stdout.readline())
    deadline = time.monotonic() + 30
    while len(session_members(session)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    files = engine_files(session)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone(session)
    assert not [file for file in files if file.exists()]


def test_a_server_whose_supervisor_is_killed(tmp_path):
    server = ServerProcess("engine", "127.0.0.1", {"model_path": "x"}, {}, tmp_path / "engine.log")
    session = server._process.pid
    deadline = time.monotonic() + 30
    while len(session_members(session)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    files = engine_files(session)
    assert [file for file in files if file.parent == Path(tempfile.gettempdir())]
    supervisor = sorted(session_members(session))[1]
    os.kill(supervisor, signal.SIGKILL)
    assert gone(session)
    server._process.wait(10)
    assert "exit code 137" in server.failure()
    server.close()
    assert not [file for file in files if file.exists()]


def test_last_words(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    assert last_words(log) == "nothing was logged"
    log.write_text("starting\nstill starting\n")
    assert last_words(log) == "still starting"
    log.write_text(
        "[2026-01-01 00:00:00] Scheduler hit an exception: Traceback\n  File 'a'\nOSError: no space\n\nbye\n"
    )
    assert last_words(log) == "OSError: no space"
    log.write_text("usage: server.py\nserver.py: error: argument --port: invalid int value: 'x'\n")
    assert last_words(log) == "server.py: error: argument --port: invalid int value: 'x'"


def test_free_ports_are_out_of_the_way_of_outgoing_connections():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20000 <= free_port("127.0.0.1") < min(32768, lowest) for _ in range(20))
