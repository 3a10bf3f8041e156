"""What a tool is: a function that the policy calls by writing its name and arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ToolError(Exception):
    """A call that failed, for example with wrong arguments or out of time. The message is the policy's answer."""


class Tool(ABC):
    """Made once per run by the environment `tools`, with its options as keyword arguments; `open` around all its use.

    ``name`` is what the policy calls. ``schema`` is what the chat template shows of it: OpenAI's function schema,
    ``{"type": "function", "function": {"name", "description", "parameters"}}``, the parameters as JSON Schema.
    """

    name: str
    schema: dict[str, Any]

    async def open(self) -> None:  # noqa: B027 - most have nothing to start
        """Start what the tool needs, for example processes. Raises UserError or RunError."""

    async def close(self) -> None:  # noqa: B027
        """End it. Also called where `open` failed."""

    @abstractmethod
    async def call(self, **arguments: Any) -> str:
        """The answer to one call, as text for the policy. Many calls run at the same time.

        The arguments were checked against ``schema``: those that it requires are there, and there are no others. Raises
        ToolError for what the policy should read and mend. A call that takes longer than the environment's ``timeout_s``
        is cancelled: catch asyncio.CancelledError to clean up, and raise it again.
        """
