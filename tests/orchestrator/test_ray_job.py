"""`ray job submit -- python -m rl_tpu.train` on a running Ray cluster, which the run joins and leaves as it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from jobs import SHORT

pytestmark = pytest.mark.slow
RAY = Path(sys.executable).with_name("ray")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def cluster():
    """A Ray head with its dashboard, as an administrator starts it; its job server's address and environment."""
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's socket paths have a length limit
    port, dashboard, agent, client = free_ports(4)
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "rl-tpu-test"}
    arguments = [
        *("--head", "--block", "--num-cpus=2", "--disable-usage-stats", f"--temp-dir={temporary}", f"--port={port}"),
        *(
            f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent}",
            f"--ray-client-server-port={client}",
        ),
    ]
    head = subprocess.Popen(
        [str(RAY), "start", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield environment | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    children = psutil.Process(head.pid).children(recursive=True)
    head.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs([psutil.Process(head.pid), *children], timeout=20)
    for process in alive:
        process.kill()
    shutil.rmtree(temporary, ignore_errors=True)


def ray_job(cluster, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess:
    command = [str(RAY), "job", *arguments]
    return subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_a_ray_job_succeeds(cluster, tmp_path, tiny_model):
    deadline = time.monotonic() + 120
    while ray_job(cluster, "list").returncode != 0:
        assert time.monotonic() < deadline, "the cluster's job server does not answer"
        time.sleep(1)
    run_dir = tmp_path / "run"
    overrides = ["+experiment=quickstart", f"model.path={tiny_model}", "model.make=null", f"run_dir={run_dir}", *SHORT]
    done = ray_job(cluster, "submit", "--", sys.executable, "-m", "rl_tpu.train", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout + done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    assert "SUCCEEDED" in ray_job(cluster, "list").stdout
