"""Tools by import path: functions, classes, and some that misbehave."""

from __future__ import annotations

import asyncio
import time

from rl_tpu.environments import Tool, ToolError


def add(a: int, b: int) -> int:
    """
    Adds two whole numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what
    """
    return text


def untyped(a):
    """Adds."""
    return a


def moody(wish: str, count: int = 1) -> str:
    """
    Does what it is asked for.

    Args:
        wish: what to do
        count: how often
    """
    if wish == "raise":
        raise KeyError("mood")
    if wish == "refuse":
        raise ToolError("I would rather not")
    if wish == "hang":
        time.sleep(20)
    if wish == "babble":
        return "a" + "b" * 100_000 + "c"
    return wish * count


def _schema(name: str) -> dict:
    parameters = {"type": "object", "properties": {"guest": {"type": "string"}}, "required": ["guest"]}
    return {"type": "function", "function": {"name": name, "description": "Two must meet.", "parameters": parameters}}


class Meeting(Tool):
    """A call ends when as many guests are there as it takes: calls one after the other would wait for ever."""

    name = "meet"
    schema = _schema("meet")

    def __init__(self, *, size: int = 2) -> None:
        self.size = size
        self.log: list[str] = []
        self._complete = asyncio.Event()
        self._guests: list[str] = []

    async def open(self) -> None:
        self.log.append("open")

    async def close(self) -> None:
        self.log.append("close")

    async def call(self, guest: str) -> str:
        self._guests.append(guest)
        if len(self._guests) == self.size:
            self._complete.set()
        try:
            await self._complete.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return f"{guest} met {len(self._guests) - 1}"


class NotOpening(Meeting):
    name = "broken"
    schema = _schema("broken")

    async def open(self) -> None:
        raise OSError("no room")


class NoSchema(Meeting):
    schema = {"type": "function", "function": {"name": "meet", "parameters": {"type": "thing"}}}  # noqa: RUF012
