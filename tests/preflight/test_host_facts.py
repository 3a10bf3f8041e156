"""Chips and who holds them, packages, disk and shared memory: with real files and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from test_memory_verdict import SIZES

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.preflight.environment import (
    check_chips,
    check_disk,
    check_packages,
    check_shared_memory,
    devices_of_torch_tpu,
)
from rl_tpu.orchestrator.preflight.host import chip_files, find_holders, host_facts

CONFIG = load_config(["+experiment=qwen3_4b_dapo"])


@pytest.fixture
def host(tmp_path):
    """A host with the device files of four chips; its processes are this machine's."""
    for path in ("dev/accel0", "dev/accel1", "dev/accel10", "dev/accel2", "dev/accel_control", "dev/vfio/vfio"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "dev/shm").mkdir()
    (tmp_path / "proc").symlink_to("/proc")
    return tmp_path


@pytest.fixture
def holder(host):
    """A process that has a chip open."""
    script = host / "engine.py"
    script.write_text(
        f"import sys\nfile = open({str(host / 'dev/accel1')!r})\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "open\n"
        yield process
        process.stdin.close()


def test_chips_are_the_numbered_files_in_order(host):
    assert [Path(file).name for file in chip_files(host)] == ["accel0", "accel1", "accel2", "accel10"]
    (host / "dev/vfio/7").touch()
    assert str(host / "dev/vfio/7") in chip_files(host)


def test_the_process_that_holds_a_chip_is_named(host, holder):
    (found,), _ = find_holders(chip_files(host), host)
    assert (found.pid, found.file) == (holder.pid, str(host / "dev/accel1"))
    assert found.name.endswith("engine.py")
    check = check_chips(CONFIG, host_facts(host), 8)
    assert check.status == "failed"
    assert f"by process {holder.pid} (" in check.detail
    holder.stdin.close()
    holder.wait()
    assert check_chips(CONFIG, host_facts(host), 8).status == "ok"


def test_missing_devices_are_told_with_both_numbers(host):
    check = check_chips(CONFIG, host_facts(host), 4)
    assert check.status == "failed"
    assert check.detail.startswith("4 device files; torch_tpu: 4")
    assert check.detail.endswith("the configuration says cluster.chips_per_host 4 x devices_per_chip 2")


def test_torch_tpu_counts_no_device_where_there_is_none():
    if chip_files():
        pytest.skip("this machine has chips")
    assert devices_of_torch_tpu() == 0


def test_a_container_with_64_mib_of_shared_memory_is_refused():
    """In a mount namespace whose /dev/shm is as small as a container's."""
    program = "import dataclasses, json; from rl_tpu.orchestrator.preflight.host import host_facts; " + (
        "print(json.dumps(dataclasses.asdict(host_facts())))"
    )
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && {sys.executable} -c '{program}'"
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"this machine allows no mount namespace: {done.stderr}")
    measured = json.loads(done.stdout)
    assert measured["shm_total"] == 64 * 2**20
    facts = replace(host_facts(), shm_total=measured["shm_total"], shm_free=measured["shm_free"])
    check = check_shared_memory(CONFIG, SIZES, facts)
    assert check.status == "failed"
    assert "--shm-size=33g" in check.detail  # two policies of 16 GiB
    assert check_shared_memory(CONFIG, SIZES, facts, judge=False).status == "note"
    assert check_shared_memory(CONFIG, replace(SIZES, engine_policy=2**20), facts).status == "ok"
    other = load_config(["+experiment=qwen3_4b_dapo", "weight_sync=disk"])
    assert check_shared_memory(other, SIZES, facts).status == "skipped"


def test_disk_for_the_checkpoints_that_are_kept(tmp_path):
    config = load_config(["+experiment=quickstart"])
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    small, large = replace(SIZES, checkpoint=1, engine_policy=1), replace(SIZES, checkpoint=free // 2, engine_policy=0)
    assert check_disk(config, small, tmp_path / "run" / "not" / "there").status == "ok"
    assert check_disk(config, large, tmp_path).status == "failed"
    assert str(tmp_path) in check_disk(config, large, tmp_path / "run").detail


def test_packages_are_those_the_project_asks_for(monkeypatch):
    assert check_packages("cpu").status == "ok"
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "torchtitan" else real(name))
    check = check_packages("cpu")
    assert check.status == "failed"
    assert check.detail == "torchtitan is 0.1, wanted ==0.3.0"
