"""How much shared memory can still be had: the file system's free space, the machine's memory, the container's limit."""

from __future__ import annotations

import os
import re
from pathlib import Path

from weight_sync.errors import SpaceError
from weight_sync.shared_memory.segments import HEADER_BYTES


def require_space(slots: int, nbytes: int, directory: Path) -> None:
    """Raises SpaceError with the numbers unless ``slots`` segments of ``nbytes`` fit."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    memory = available_memory_bytes()
    need = slots * (HEADER_BYTES + nbytes)
    if need > min(free, memory):
        size = f"{int(need / 2**30) + 1}g"
        raise SpaceError(
            f"{directory} has {free / 1e9:.2f} GB free and this process can have {memory / 1e9:.2f} GB of memory, but "
            f"{slots} segment(s) of {nbytes / 1e9:.2f} GB need {need / 1e9:.2f} GB. Enlarge it (docker: "
            f"--shm-size={size}; Kubernetes: an emptyDir of medium Memory at {directory}, within the memory limit; "
            f"host: mount -o remount,size={size} {directory})" + (", or open the sender with slots=1" * (slots > 1))
        )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What this process may still use: of the machine, and of every control group it is in (``root`` holds proc, sys).

    Pages of /dev/shm count against the group that touched them first.
    """
    machine = int(re.search(r"MemAvailable:\s+(\d+)", (root / "proc/meminfo").read_text())[1]) * 1024
    return min([machine, *_group_memory(root)])


# The type of a control group's file system, and what it calls the limit, the use, and the page cache in memory.stat.
_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    "cgroup2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def _group_memory(root: Path) -> list[int]:
    """Bytes left in this process' control group and in every group above it that has a limit."""
    try:
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except FileNotFoundError:
        return []
    paths = {
        "cgroup" if controllers else "cgroup2": path for _, controllers, path in lines if controllers in ("", "memory")
    }
    left = []
    for fields in mounts:
        # 36 35 0:29 <root of the mount> <mount point> <options> [<tags>...] - <type> <source> <options of the type>
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            top, inside = root / fields[4].lstrip("/"), os.path.relpath(paths[kind], fields[3])
            group = top if inside.startswith("..") else top / inside
            while group.is_relative_to(top):
                left.append(_left_in(group, *_FILES[kind]))
                group = group.parent
    return [nbytes for nbytes in left if nbytes is not None]


def _left_in(group: Path, limit_file: str, use_file: str, cache_fields: tuple[str, ...]) -> int | None:
    try:
        limit, used = ((group / name).read_text().strip() for name in (limit_file, use_file))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None  # no such group from in here; or the root group of version 2, which has no limit
    if limit == "max":
        return None
    cache = sum(int(stat.get(field, 0)) for field in cache_fields)  # the kernel gives it up before it refuses memory
    return max(0, int(limit) - (int(used) - cache))
