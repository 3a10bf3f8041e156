"""The Ray actor that owns a server. It imports little: an engine's start waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from rl_tpu.rollout.process import ServerProcess


class ServerActor:
    """One SGLang server, on the actor's host and devices. It lives as long as this process, however that ends.

    ``options`` are SGLang's arguments by name; ``driver`` is the address of the driver's host: a server on the same host
    listens on loopback only.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path, driver: str
    ) -> None:
        own = ray.util.get_node_ip_address()
        host = "127.0.0.1" if own == driver else own
        self._server = ServerProcess(name, host, options, environment, log)

    def start(self, timeout_s: float) -> str:
        """The server's URL, once it answers. Raises UserError or RunError."""
        self._server.wait_healthy(timeout_s)
        return self._server.url

    def failure(self) -> str | None:
        """Why the server does not run; None while it does."""
        return self._server.failure()

    def close(self) -> None:
        self._server.close()
