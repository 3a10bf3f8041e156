"""What is left of a server on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from rl_tpu.rollout.leftovers import SCRATCH_PREFIX

SHARED_MEMORY = Path("/dev/shm")


def session_members(session: int) -> list[int]:
    """Living processes of a session; the server is started in one of its own."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def engine_files(session: int) -> set[Path]:
    """Shared memory that a server's processes use, and its temporary directory."""
    files = set()
    for member in session_members(session):
        maps = Path(f"/proc/{member}/maps").read_text()
        files.update(path for path in SHARED_MEMORY.glob("sglang_*") if str(path) in maps)
    files.update(Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}{session}-*"))
    return files


def cpu_seconds(process: int) -> float:
    """CPU time a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def gone(session: int, within_s: float = 10.0) -> bool:
    """Whether all processes of a session are gone soon."""
    deadline = time.monotonic() + within_s
    while session_members(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
