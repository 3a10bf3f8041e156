"""The transports that tests go through, and the options each needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weight_sync import WeightSyncError
from weight_sync.transport import TRANSPORTS, find_transport


def _imports(name: str) -> bool:
    try:
        find_transport(name)
    except WeightSyncError:
        return False
    return True


AVAILABLE = [name for name in TRANSPORTS if _imports(name)]


def sender_options(transport: str, directory: Path) -> dict[str, Any]:
    """``directory`` is the test's own."""
    return {"disk": {"url": str(directory)}, "disk_delta": {"url": str(directory)}}.get(transport, {})
