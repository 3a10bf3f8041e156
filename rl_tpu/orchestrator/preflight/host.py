"""What one host is like, as seen by a process on it: chips and who holds them, memory and /dev/shm."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from weight_sync.shared_memory.space import available_memory_bytes

ROOT = Path("/")


@dataclass(frozen=True)
class Holder:
    """A process that has a chip's file open: nobody else can use the chip until it ends."""

    pid: int
    name: str
    file: str


@dataclass(frozen=True)
class HostFacts:
    """One host, or one container on it."""

    name: str
    chip_files: tuple[str, ...]
    """Device files of accelerators: /dev/accel*, or /dev/vfio/NUMBER where a chip is passed through."""
    holders: tuple[Holder, ...]
    unreadable_processes: int
    """Processes of others, whose open files this user may not see."""
    shm_total: int
    """Bytes of /dev/shm: what it may hold, and what is left of it."""
    shm_free: int
    memory_available: int
    """Bytes of memory that this process can still have, within the limits of its container."""


def host_facts(root: Path = ROOT) -> HostFacts:
    """The facts of this host. `root` holds dev and proc."""
    chips = chip_files(root)
    holders, unreadable = find_holders(chips, root)
    shm = os.statvfs(root / "dev/shm")
    return HostFacts(
        name=socket.gethostname(),
        chip_files=chips,
        holders=holders,
        unreadable_processes=unreadable,
        shm_total=shm.f_blocks * shm.f_frsize,
        shm_free=shm.f_bavail * shm.f_frsize,
        memory_available=available_memory_bytes(),
    )


def chip_files(root: Path = ROOT) -> tuple[str, ...]:
    """Device files of this host's chips. (/dev/vfio/vfio is no chip, it is there with any pass-through.)"""
    found = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    return tuple(sorted(map(str, found), key=lambda path: (len(path), path)))


def find_holders(files: tuple[str, ...], root: Path = ROOT) -> tuple[tuple[Holder, ...], int]:
    """Processes that have one of `files` open, and how many processes could not be looked into."""
    holders, unreadable = set(), 0
    for process in (root / "proc").glob("[0-9]*") if files else ():
        try:
            opened = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
        except PermissionError:
            unreadable += 1
            continue
        except OSError:
            continue  # it has just ended
        for file in set(opened) & set(files):
            holders.add(Holder(int(process.name), _name(process), file))
    return tuple(sorted(holders, key=lambda holder: (holder.file, holder.pid))), unreadable


def _name(process: Path) -> str:
    """What a person knows it by: for an interpreter, the script or module it runs."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    program = os.path.basename(words[0]) if words and words[0] else "a process without a name"
    if re.match(r"python", program):
        module = (
            words[words.index("-m") + 1] if "-m" in words[:-2] else next((w for w in words[1:] if w[:1] != "-"), "")
        )
        return f"{program} {os.path.basename(module)}".strip()[:80]
    return program
