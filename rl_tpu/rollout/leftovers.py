"""What a server of SGLang's leaves on a machine where it is killed: files in /dev/shm and a temporary directory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

SCRATCH_PREFIX = "rl_tpu-engine-"
"""Begins the name of a server's temporary directory; its process id follows."""
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:sgl_shm_|sglang_|multi_tokenizer_args_)\S*")


def held_files(group: int | None = None) -> set[str]:
    """SGLang's files in /dev/shm that a process has mapped or open: one of the process group, or any."""
    files = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if group is None or os.getpgid(int(process.name)) == group:
                files.update(_SHARED_MEMORY.findall((process / "maps").read_text()))
                opened = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
                files.update(path for path in opened if _SHARED_MEMORY.fullmatch(path))
    return files


def new_files(since: float) -> set[str]:
    """SGLang's files in /dev/shm that were made after a time."""
    files = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if _SHARED_MEMORY.fullmatch(str(path)) and path.stat().st_ctime >= since:
                files.add(str(path))
    return files
