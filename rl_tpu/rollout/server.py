"""The SGLang server: ``python -m rl_tpu.rollout.server SGLANG_ARGUMENTS``.

Three processes. The second supervises: it lives as long as its standard input, which whoever started it keeps open, and
as long as the third, which is SGLang. When either ends, in whatever way, it kills all that SGLang started, collects the
dead and removes the files they left in /dev/shm and in their temporary directory. (A parent-death signal alone would
follow the thread that started the server, and Ray moves calls between threads.) The first only waits for the supervisor,
because Ray kills the children of an actor that it ends before they can do anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from rl_tpu.rollout import sglang_cpu
from rl_tpu.rollout.leftovers import SCRATCH_PREFIX, held_files, new_files

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SNAPSHOT_SECONDS = 2.0


def prepare() -> None:
    """What every process of the server needs before it imports SGLang."""
    if sglang_cpu.chosen():
        sglang_cpu.prepare_process()
    from rl_tpu.rollout import distributed_loader, prefix_cache, streamed_versions, weight_loader, worker_environment

    prefix_cache.register_hooks()
    streamed_versions.register_hooks()
    weight_loader.register_hooks()
    distributed_loader.register_hooks()
    worker_environment.register_hooks()


def main() -> None:
    scratch = tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-")
    supervisor = os.fork()
    if supervisor != 0:
        exit_like(os.waitpid(supervisor, 0)[1])
    server = os.fork()
    if server == 0:
        serve(scratch)
    exit_like(supervise(server, scratch))


def serve(scratch: str) -> NoReturn:
    """Become SGLang, in a process group of its own."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch  # SGLang leaves its sockets there (Python has looked already)
    prepare()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
    sys.exit(0)


def supervise(server: int, scratch: str) -> int:
    """Wait until the owner or the server ends; then leave nothing behind. The server's wait status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ended = os.pidfd_open(server)
    files: set[str] = set()
    running = True
    while running:
        looked = time.time()
        ready, _, _ = select.select([0, ended], [], [], SNAPSHOT_SECONDS)
        files |= held_files(server)
        running = ended not in ready and (0 not in ready or bool(os.read(0, 4096)))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    result = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, 0)
            if child == server:
                result = status
    files |= new_files(looked) - held_files()  # what it made since the last snapshot was read
    for file in files:
        Path(file).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def exit_like(status: int) -> NoReturn:
    """End as the process with this wait status did, a signal as shells report it."""
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


# Where SGLang spawns its workers (on our CPU platform it forks them), each of them first imports this module.
if __name__ == "__mp_main__":
    prepare()
elif __name__ == "__main__":
    main()
