"""Running an agent as a command: a process group of its own, of which nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

MAX_OUTPUT_BYTES = 64 * 1024
"""Kept of what a command prints, from its end."""
DRAIN_S = 5.0
"""What the output of a command gets to end after all of its processes were killed."""


async def run_command(command: Sequence[str], task: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Run a command with the task as JSON on its standard input; its whole process group is killed at the end.

    The result is its last line, if that is a JSON object with a `reward`, else None. Raises RuntimeError if it ends with
    another exit code than 0, and OSError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    outputs = [asyncio.ensure_future(_tail(stream)) for stream in (process.stdout, process.stderr)]
    try:
        with contextlib.suppress(ConnectionError):  # it need not read its task
            process.stdin.write(json.dumps(task).encode())
            await process.stdin.drain()
            process.stdin.close()
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        done, late = await asyncio.wait(outputs, timeout=DRAIN_S)
        for output in late:
            output.cancel()
        await process.wait()
    said, errors = [output.result() if output in done else "" for output in outputs]
    if code != 0:
        raise RuntimeError(f"{command[0]} ended with exit code {code}: {(errors or said).strip()[-300:]}")
    return _reward(said)


def _reward(said: str) -> Any:
    lines = said.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and "reward" in found else None


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while piece := await stream.read(MAX_OUTPUT_BYTES):
        kept = (kept + piece)[-MAX_OUTPUT_BYTES:]
    return kept.decode(errors="replace")
