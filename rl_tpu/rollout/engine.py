"""What a rollout engine is to the rest of the house. A new kind of engine is one class with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_tpu.errors import RunError
from rl_tpu.types import Completion, SamplingParams


class EngineLostError(RunError):
    """The engine is gone or holds no whole policy; the same request may be put to another one."""


@dataclass(frozen=True)
class WeightUpdate:
    """How one engine came by a policy version."""

    version: int
    seconds: float
    """The whole update, from request to answer."""
    pause_seconds: float
    """How long generation stood still."""
    verify_seconds: float
    """Receiving the tensors and comparing their hashes; a part of the pause."""
    tensors: int
    """Tensors loaded, each verified before unless weight_sync.verify is off."""
    bytes: int
    """Their size."""


class Engine(Protocol):
    """One engine, on its own devices. All methods may run at the same time, from one event loop."""

    name: str
    """How messages call it, for example ``engine 0``."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, n: int) -> list[Completion]:
        """``n`` completions of the prompt.

        Raises:
            UserError: no engine could serve this request.
            EngineLostError: the engine is gone, or failed to take a new policy meanwhile.
            RunError: the engine refused the request or did not answer.
        """

    async def update_weights(self, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        """Serve policy ``version`` from now on; ``handle`` is what weight_sync's sender published.

        Requests in flight go on under the new version. Raises RunError if the version was not taken whole: requests in
        flight are then lost, and the engine must not be used until a later update succeeds.
        """

    async def weight_checksums(self) -> dict[str, str]:
        """Checksums of the live weights by the engine's own parameter names (see `checksums.py`)."""

    async def healthy(self) -> bool:
        """Whether it can generate."""

    async def close(self) -> None:
        """End it and give back everything it holds."""
