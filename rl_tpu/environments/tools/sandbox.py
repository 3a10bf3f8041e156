"""Runs Python programs that nobody has read, each in a process of its own that the kernel confines.

The process (`confined/program.py`) binds itself before it looks at the program: no new processes, no sockets, no files
but the interpreter's libraries and an empty scratch directory, so much memory; and it ends with whoever started it.
`watch` keeps the limits that a process cannot give itself: its time, the size of its output and of its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_tpu.environments.tools.scratch import ScratchDirectories, remove_tree
from rl_tpu.environments.tools.watch import MB, Limits, Outcome, watch
from rl_tpu.errors import RunError

_PROGRAM = Path(__file__).parent / "confined" / "program.py"
_END_TIMEOUT_S = 10.0


class Sandbox:
    """Runs at most ``workers`` programs at a time, more wait; `open` before, `close` after.

    With ``site_packages`` programs may import the packages installed beside this interpreter; with ``best_effort`` they
    run even where the kernel lacks some of what confines them.
    """

    def __init__(self, limits: Limits, workers: int, site_packages: bool = False, best_effort: bool = False) -> None:
        paths = sysconfig.get_paths()
        self._limits = limits
        self._workers = workers
        self._packages = sorted({paths["purelib"], paths["platlib"]}) if site_packages else []
        self._best_effort = best_effort
        self._directories: ScratchDirectories | None = None

    async def open(self) -> None:
        """Raises NotIsolated if the kernel cannot confine a program, RunError if Python does not start."""
        self._directories = ScratchDirectories()
        # A confined process ends with the thread that started it: these threads live until `close`.
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="sandbox")
        outcome = await self.run("1 + 1")
        if outcome != Outcome("2", failed=False):
            raise RunError(f"a sandboxed Python makes of 1 + 1: {outcome.text or 'nothing'}")

    async def close(self) -> None:
        """After this there is no process and no file left."""
        if self._directories is not None:
            await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
            self._directories.remove()
            self._directories = None

    async def run(self, program: str) -> Outcome:
        """Run the program to its end or to its first limit. If this is cancelled, the program is ended.

        Raises as `open` does.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, program, cancelled)
        finally:
            cancelled.set()

    def _run(self, program: str, cancelled: threading.Event) -> Outcome:
        scratch = self._directories.make()
        try:
            process = self._start(program, scratch)
            try:
                return watch(process, scratch, self._limits, cancelled)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_TIMEOUT_S)
                process.stdout.close()
        finally:
            remove_tree(scratch)

    def _start(self, program: str, scratch: Path) -> subprocess.Popen:
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        # What the process reads is a file without a name: the process need not read for this one to go on.
        with tempfile.TemporaryFile(dir=self._directories.path) as source:
            source.write(json.dumps(self._bounds(scratch)).encode() + b"\n" + program.encode(errors="replace"))
            source.seek(0)
            return subprocess.Popen(
                [sys.executable, "-s", "-S", str(_PROGRAM)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                # The same program prints the same: no seed from chance, no settings of the host.
                env=kept
                | {"HOME": str(scratch), "TMPDIR": str(scratch), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
                | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _bounds(self, scratch: Path) -> dict[str, Any]:
        """As `confined/confinement.py` takes them."""
        return {
            "parent": os.getpid(),
            "scratch": str(scratch),
            "packages": self._packages,
            "memory_bytes": self._limits.memory_mb * MB,
            "file_bytes": self._limits.disk_mb * MB,
            "cpu_s": math.ceil(self._limits.timeout_s) + 1,
            "best_effort": self._best_effort,
        }
