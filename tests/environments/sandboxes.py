"""What the tests of the sandbox share: running programs, and looking for what they left."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_tpu.environments.tool import ToolError
from rl_tpu.environments.tools.python import Python
from rl_tpu.environments.tools.scratch import PREFIX


@dataclass
class Answer:
    text: str
    failed: bool
    seconds: float


async def ask(tool: Python, code: str) -> Answer:
    started = time.monotonic()
    try:
        text, failed = await tool.call(code=code), False
    except ToolError as error:
        text, failed = str(error), True
    return Answer(text, failed, time.monotonic() - started)


def answers(*programs: str, **options: Any) -> list[Answer]:
    """All programs at the same time, in one tool with these options; nothing may be left of them."""

    async def run() -> list[Answer]:
        tool = Python(**options)
        await tool.open()
        try:
            return await asyncio.gather(*(ask(tool, program) for program in programs))
        finally:
            await tool.close()

    found = asyncio.run(run())
    assert not left_over()
    return found


def answer(program: str, **options: Any) -> Answer:
    return answers(program, **options)[0]


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path, monkeypatch):
    """Every test has its own, so that what it leaves is told from what others do on this machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def left_over() -> set[str]:
    """Directories of sandboxes and processes that were started in one."""
    left = {path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}
    home = f"HOME={tempfile.gettempdir()}/{PREFIX}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if home in (process / "environ").read_bytes():
                left.add(f"process {process.name}")
    return left
