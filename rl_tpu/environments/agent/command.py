"""Running an agent as a command: a process group of its own, of which nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

MAX_OUTPUT_BYTES = 64 * 1024
"""Kept of what a command prints, from its end."""
DRAIN_S = 2.0
"""What the output of a command gets to end after its processes were killed."""
SHOWN = 300
"""Characters of its errors that are told."""


async def run_command(command: Sequence[str], task: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Run a command with the task as JSON on its standard input; its whole process group is killed at the end.

    The result is its last line, if that is a JSON object with a `reward`, else None. Raises RuntimeError if it ends with
    another exit code than 0, and OSError if it cannot be started.
    """
    async with _output() as (said, said_end), _output() as (errors, errors_end):
        # A file and not a pipe: the command need not read its task.
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(task).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=said_end,
                stderr=errors_end,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code != 0:
        told = (errors.result() or said.result()).strip()[-SHOWN:]
        raise RuntimeError(f"{command[0]} ended with exit code {code}: {told}")
    return _reward(said.result())


@contextlib.asynccontextmanager
async def _output() -> AsyncIterator[tuple[asyncio.Future[str], int]]:
    """The end of what is written into a file descriptor. Made by hand: a process with a pipe of asyncio's counts as running
    as long as any of its children holds the pipe."""
    readable, writable = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(readable, "rb"))
    tail: asyncio.Future[str] = asyncio.ensure_future(_tail(reader))
    try:
        yield tail, writable
    finally:
        os.close(writable)
        late = asyncio.get_running_loop().call_later(DRAIN_S, reader.feed_eof)  # held by one that left the group
        await asyncio.wait({tail})
        late.cancel()
        transport.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while piece := await stream.read(MAX_OUTPUT_BYTES):
        kept = (kept + piece)[-MAX_OUTPUT_BYTES:]
    return kept.decode(errors="replace")


def _reward(said: str) -> Any:
    lines = said.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and "reward" in found else None
