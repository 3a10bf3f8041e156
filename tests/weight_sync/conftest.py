from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

import pytest
import sync_processes as sp
from sync_processes import Remote


@pytest.fixture
def run_id():
    """A run id of this test alone; its segments are gone afterwards."""
    run_id = f"test-{secrets.token_hex(4)}"
    yield run_id
    for path in Path("/dev/shm").glob(f"weight_sync.{run_id}*"):
        path.unlink()


@pytest.fixture
def small_tmpfs(tmp_path):
    """``small_tmpfs(megabytes)``: a file system of that size, in memory. Only root may mount one."""
    mounted = []

    def mount(megabytes: int) -> Path:
        place = tmp_path / "tmpfs"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place]
        done = subprocess.run(command, capture_output=True, timeout=30)
        if done.returncode:
            pytest.skip(f"mounting a file system needs root: {done.stderr.decode().strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True, timeout=30)


@pytest.fixture(scope="session")
def engine():
    """An engine's process with a receiver."""
    remote = Remote()
    remote.call(sp.open_receiving, {})
    yield remote
    remote.kill()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two trainer ranks in processes of their own, joined by gloo."""
    rendezvous = str(tmp_path_factory.mktemp("gloo") / "store")
    remotes = [Remote(), Remote()]
    for rank, remote in enumerate(remotes):
        remote.start(sp.join, rank, 2, rendezvous, 60)
    for remote in remotes:
        remote.finish()
    yield remotes
    for remote in remotes:
        remote.kill()


@pytest.fixture(scope="session")
def worker():
    """A one-rank trainer in a process of its own."""
    remote = Remote()
    yield remote
    remote.kill()


@pytest.fixture
def trainer():
    """A one-rank trainer in a process of its own, to be killed."""
    remote = Remote()
    yield remote
    remote.kill()
