"""A server process from start to end: its port, its log, its health, and what is said when it fails."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.leftovers import SCRATCH_PREFIX, held_files, new_files

CLOSE_TIMEOUT_S = 10.0
_ERROR_LINE = re.compile(r"^\s*(\[[^\]]*\] )?([\w.]*(Error|Exception|Interrupt)\b.*: |.*\berror: )")


def free_port(host: str) -> int:
    """A free port below the range the kernel hands out to clients, who could take it before the server is up."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError:
                continue
    raise RunError(f"no free port between 20000 and 32767 on {host}")


def server_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line. A true option is a flag of its own; false and None mean SGLang's default."""
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            arguments.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            arguments += map(str, value)
        elif value is not True:
            arguments.append(str(value))
    return arguments


def last_words(log: Path, start: int = 0) -> str:
    """The line of a log, from byte ``start`` on, that says best why its process ended: the last error, else the last."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines or ["nothing was logged"])[-1]


class ServerProcess:
    """`rl_tpu.rollout.server` with the given SGLang options, in a session of its own.

    It ends when this object is closed or this process ends. All output is appended to ``log``.
    """

    def __init__(self, name: str, host: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path):
        port = free_port(host)
        self.name = name
        self.url = f"http://{host}:{port}"
        self.log = log
        self._started_at = time.time()
        arguments = server_arguments({**options, "host": host, "port": port})
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rl_tpu.rollout.server", *arguments]
        with log.open("ab") as output:
            self._log_start = output.tell()
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait_healthy(self, timeout_s: float) -> None:
        """Return once the server answers.

        Raises:
            UserError: it does not know an argument.
            RunError: it ended, or did not answer within the deadline; it is then closed.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            failure = self.failure()
            if failure is None and time.monotonic() > deadline:
                failure = (
                    f"{self.name} was not up within rollout.start_timeout_s {timeout_s:g} s; its log is {self.log}"
                )
            if failure is not None:
                usage = self._process.poll() == 2
                self.close()
                raise UserError(f"{failure} (see rollout.server_options)") if usage else RunError(failure)
            time.sleep(0.1)

    def failure(self) -> str | None:
        """Why the server is not running, with its last words and where its log is; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{self.name} ended with exit code {code}: {last_words(self.log, self._log_start)} (log: {self.log})"

    def close(self) -> None:
        """End the server and everything it started."""
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for scratch in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}{self._process.pid}-*"):
            # It is still there only if the server's supervisor was killed.
            shutil.rmtree(scratch, ignore_errors=True)
            for file in new_files(self._started_at) - held_files():
                Path(file).unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False
