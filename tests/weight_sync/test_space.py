"""Limits of containers, as the kernel's files of both versions of control groups state them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weight_sync.shared_memory.space import available_memory_bytes

MACHINE_BYTES = 1000 * 1024
V1 = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "30 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "36 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
OTHER_V1 = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


@pytest.fixture
def machine(tmp_path):
    def make(groups: str, mounts: list[str], files: dict[str, str]) -> Path:
        files |= {
            "proc/meminfo": f"MemTotal: 9999 kB\nMemAvailable:    {MACHINE_BYTES // 1024} kB\n",
            "proc/self/cgroup": groups,
            "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/root rw\n" + "\n".join(mounts) + "\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def group(place: str, limit: str | int, used: int, cache: int = 0) -> dict[str, str]:
    place, stat = f"sys/fs/cgroup/{place}", f"anon 1\nshmem 7\nactive_file {cache}\ninactive_file {cache}\n"
    return {f"{place}/memory.max": f"{limit}\n", f"{place}/memory.current": f"{used}\n", f"{place}/memory.stat": stat}


def group_v1(place: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{place}"
    stat = f"inactive_file 5000\nshmem 7\ntotal_active_file {cache}\ntotal_inactive_file {cache}\n"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"{place}/{name}": str(text) for name, text in files.items()}


def left(root: Path) -> int:
    return available_memory_bytes(root)


def test_no_control_groups(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    1000 kB\n")
    assert available_memory_bytes(tmp_path) == MACHINE_BYTES


def test_limit_less_use_but_page_cache_is_given_up(machine):
    root = machine("0::/\n", [V2.format(mounted="/")], group("", 50_000, 30_000, cache=4_000))
    assert left(root) == 50_000 - (30_000 - 2 * 4_000)


def test_no_limit_is_the_machine(machine):
    assert left(machine("0::/\n", [V2.format(mounted="/")], group("", "max", 30_000))) == MACHINE_BYTES


@pytest.mark.parametrize(("outer", "inner", "expected"), [(90, 60, 40), (50, 60, 30), ("max", 60, 40), (50, "max", 30)])
def test_the_tightest_group_counts(machine, outer, inner, expected):
    files = group("a", outer, 20) | group("a/b", inner, 20)
    assert left(machine("0::/a/b\n", [V2.format(mounted="/")], files)) == expected


def test_a_container_sees_its_own_group_at_the_mount(machine):
    """Without a namespace for control groups the path is the host's; the mount shows the container's part only."""
    root = machine("0::/docker/abc\n", [V2.format(mounted="/docker/abc")], group("", 900, 100))
    assert left(root) == 800
    root = machine("0::/docker/abc\n", [V2.format(mounted="/kubepods/x")], group("", 900, 150))
    assert left(root) == 750


def test_version_1_beside_others(machine):
    groups = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/\n0::/\n"
    mounts = [OTHER_V1, V1.format(mounted="/docker"), HYBRID]
    files = group_v1("", 2**63 - 4096, 500) | group_v1("abc", 700, 300, cache=50)
    assert left(machine(groups, mounts, files)) == 700 - (300 - 100)


def test_use_above_the_limit_leaves_nothing(machine):
    assert left(machine("0::/\n", [V2.format(mounted="/")], group("", 100, 130))) == 0
