"""The tool `python`: the policy's programs, each in a sandbox of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_tpu.environments.tool import Tool, ToolError
from rl_tpu.environments.tools.sandbox import Sandbox
from rl_tpu.environments.tools.watch import Limits, NotIsolated
from rl_tpu.errors import UserError

Positive = Annotated[int, Field(ge=1)]


class Python(Tool):
    """Runs a Python program in a fresh process and answers with what it prints and with the value of its last line.

    Options: ``timeout_s`` of wall time for a program; ``memory_mb`` of address space; ``max_output_characters``, after
    which a program is ended; ``disk_mb`` for files in its scratch directory; ``workers``, how many programs run at a
    time; ``site_packages``: may it import the packages installed here, not only the standard library; ``isolation``:
    with `best_effort` it runs even where the kernel lacks Landlock or seccomp and a program may then read files, open
    sockets and start processes.
    """

    name = "python"

    def __init__(
        self,
        timeout_s: Annotated[float, Field(gt=0)] = 5.0,
        memory_mb: Annotated[int, Field(ge=64)] = 512,
        max_output_characters: Positive = 2000,
        disk_mb: Positive = 16,
        workers: Positive = 8,
        site_packages: bool = False,
        isolation: Literal["required", "best_effort"] = "required",
    ) -> None:
        limits = Limits(timeout_s, memory_mb, max_output_characters, disk_mb)
        self._sandbox = Sandbox(limits, workers, site_packages, best_effort=isolation == "best_effort")
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "Runs a Python program and returns what it prints and the value of its last line.",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "The program"}},
                    "required": ["code"],
                },
            },
        }

    async def open(self) -> None:
        """Raises UserError if this machine cannot isolate programs, RunError if it cannot run them."""
        try:
            await self._sandbox.open()
        except NotIsolated as missing:
            raise UserError(
                f"tool 'python' cannot isolate programs on this machine: {missing}; use another machine or, at your own"
                " risk, the tool's option isolation=best_effort"
            ) from missing

    async def close(self) -> None:
        await self._sandbox.close()

    async def call(self, code: str) -> str:
        """Raises ToolError if the program failed: what it printed, then why it ended."""
        if not isinstance(code, str):
            raise ToolError("code must be a string.")
        outcome = await self._sandbox.run(code)
        if outcome.failed:
            raise ToolError(outcome.text)
        return outcome.text
