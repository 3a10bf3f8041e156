"""Watches one sandboxed process from its start to its end, or to the first limit that it meets."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rl_tpu.environments.tools.scratch import holds_more
from rl_tpu.errors import RunError

READY = b"confined"
"""The first line of a process that is; `confined/program.py` writes it."""
SAID_WHY = 86
"""The exit code of a process whose program raised, and that has written what."""
START_TIMEOUT_S = 60.0
MB = 1_000_000
_LOOK_S = 0.1
"""How often the scratch directory is looked at, and whether the call was cancelled."""
_MOST_ENTRIES = 1000


class NotIsolated(Exception):
    """The kernel lacks what confines a program; the message says what."""


@dataclass(frozen=True)
class Limits:
    """Of one program: seconds, megabytes of address space, characters of output, megabytes of files."""

    timeout_s: float
    memory_mb: int
    output_characters: int
    disk_mb: int


@dataclass(frozen=True)
class Outcome:
    """What the program wrote, within the limit, and in a last line why it did not end well, if it did not."""

    text: str
    failed: bool


def watch(process: subprocess.Popen, scratch: Path, limits: Limits, cancelled: threading.Event) -> Outcome:
    """Returns when the process has ended or is to be ended. Raises NotIsolated, and RunError if it did not start."""
    output = _Output(process, most_bytes=4 * limits.output_characters + len(READY) + 1)  # UTF-8 takes up to four
    try:
        _await_start(output)
        over = _await_end(output, scratch, limits, cancelled)
    finally:
        output.close()
    text = output.written.decode(errors="replace").strip()
    if len(text) > limits.output_characters or output.full:
        over = f"The program printed more than {limits.output_characters} characters; the rest is cut off."
        text = text[: limits.output_characters]
    failed, why = (True, over) if over else _ending(process)
    return Outcome(f"{text}\n{why}".strip(), failed)


class _Output:
    """What a process writes, read as it comes, up to ``most_bytes``."""

    def __init__(self, process: subprocess.Popen, most_bytes: int) -> None:
        self.written = bytearray()
        self._most_bytes = most_bytes
        self._pipe = process.stdout.fileno()
        self._process = os.pidfd_open(process.pid)
        os.set_blocking(self._pipe, False)
        self._poller = select.poll()
        self._poller.register(self._pipe, select.POLLIN)
        self._poller.register(self._process, select.POLLIN)

    @property
    def full(self) -> bool:
        return len(self.written) > self._most_bytes

    def wait(self, seconds: float) -> bool:
        """Read what comes within the time; False once the process has ended and all of it is read."""
        ready = dict(self._poller.poll(1000 * seconds))
        if self._pipe in ready and not self._read():
            self._poller.unregister(self._pipe)  # closed, though the process may go on
        if self._process not in ready:
            return True
        while not self.full and self._read():
            pass
        return False

    def _read(self) -> bool:
        try:
            part = os.read(self._pipe, 65536)
        except BlockingIOError:
            return False
        self.written += part
        return bool(part)

    def close(self) -> None:
        os.close(self._process)


def _await_start(output: _Output) -> None:
    """Until the process is confined and begins with the program."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"\n" not in output.written and output.wait(_LOOK_S):
        if time.monotonic() > deadline:
            raise RunError(f"a sandboxed Python did not start within {START_TIMEOUT_S:g} s")
    said, newline, rest = output.written.partition(b"\n")
    if not newline or b"Error" in said:
        raise RunError(f"a sandboxed Python did not start: {output.written.decode(errors='replace')[-200:]}")
    if said != READY:
        raise NotIsolated(said.decode(errors="replace"))
    output.written = rest


def _await_end(output: _Output, scratch: Path, limits: Limits, cancelled: threading.Event) -> str:
    """Until the process has ended, or meets a limit: that is then said."""
    deadline = time.monotonic() + limits.timeout_s
    look = time.monotonic() + _LOOK_S
    while output.wait(max(0.0, min(look, deadline) - time.monotonic())) and not output.full:
        now = time.monotonic()
        if now >= deadline or cancelled.is_set():
            return f"The program was stopped after {limits.timeout_s:g} s."
        if now >= look:
            look = now + _LOOK_S
            if holds_more(scratch, limits.disk_mb * MB, _MOST_ENTRIES):
                return f"The program was stopped: its files take more than {limits.disk_mb} MB, or are too many."
    return ""


def _ending(process: subprocess.Popen) -> tuple[bool, str]:
    """Whether it failed, and how it ended if it did not say that itself. It is left to be collected."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended.si_code != os.CLD_EXITED:
        named = ended.si_status in set(signal.Signals)  # most real-time signals have no name
        by = signal.Signals(ended.si_status).name if named else f"signal {ended.si_status}"
        return True, f"The program was ended by {by}."
    if ended.si_status in (0, SAID_WHY):
        return ended.si_status != 0, ""
    return True, f"The program ended with exit code {ended.si_status}."
