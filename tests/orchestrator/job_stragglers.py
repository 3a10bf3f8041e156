"""Second turns that come late: some after a step, some so late that nobody should wait for them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

AT_MOST_S = 5.0
"""After the last step no further one comes."""


def steps_late(prompt_id: str) -> int:
    """For how many steps the prompt's second turn has to wait."""
    return {0: 1, 1: 5}.get(int(prompt_id.rpartition(":")[2]) % 5, 0)


async def late(messages, prompt):
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns == 2:
        return None
    until, deadline = _steps() + steps_late(prompt.id), time.monotonic() + AT_MOST_S
    while _steps() < until and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return "And now?"


def _steps() -> int:
    metrics = Path(os.environ["STRAGGLERS_RUN_DIR"]) / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0
