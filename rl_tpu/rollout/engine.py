"""What a rollout engine is to the rest of the house. A new kind of engine is one class with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_tpu.errors import RunError
from rl_tpu.rollout.drafts import Draft


class EngineLostError(RunError):
    """The engine is gone or holds no whole policy; the same request may be put to another one."""


class UpdateRefusedError(RunError):
    """The engine did not take a policy version and holds, and serves, the one before it whole."""


@dataclass(frozen=True)
class WeightUpdate:
    """How one engine came by a policy version."""

    version: int
    tensors: int
    """Tensors loaded, each verified before unless weight_sync.verify is off."""
    bytes: int
    """Their size."""
    stage_seconds: float
    """From request to received and verified; the engine generated meanwhile."""
    pause_seconds: float = 0.0
    """How long generation stood still for the load."""


class Engine(Protocol):
    """One engine, on its own devices. All methods may run at the same time, from one event loop."""

    name: str
    """How messages call it, for example ``engine 0``."""

    async def write(self, drafts: Sequence[Draft]) -> None:
        """Go on with unfinished samples until all are finished, or aborted by an update. They grow meanwhile, and keep what
        was written where this ends with an error.

        Raises:
            UserError: no engine could serve this request.
            EngineLostError: the engine is gone, or broke off the load of a new policy meanwhile.
            RunError: the engine refused the request or did not answer.
        """

    async def stage(self, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        """Receive and verify policy ``version``, which weight_sync published as ``handle``, while generation goes on.

        Raises UpdateRefusedError if it could not be received, does not verify or does not fit the model.
        """

    async def load(self, staged: WeightUpdate) -> WeightUpdate:
        """Stop generating, serve what was staged from now on, go on generating.

        weight_sync.pause_mode says what becomes of samples in flight. Raises UpdateRefusedError if nothing was loaded,
        EngineLostError if the load broke off: requests in flight are then lost, and the engine must not be used until a
        later load succeeds.
        """

    async def restart(self) -> None:
        """End what is left of the engine and start it anew, with the weights of the model directory.

        Raises RunError or UserError if it does not come up.
        """

    async def failure(self) -> str | None:
        """Why its process is gone; None while it lives."""

    async def weight_checksums(self) -> dict[str, str]:
        """Checksums of the live weights by the engine's own parameter names (see `checksums.py`)."""

    async def healthy(self) -> bool:
        """Whether it can generate."""

    async def close(self) -> None:
        """End it and give back everything it holds."""
