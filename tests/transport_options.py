"""What tests tell each transport's sender beside what all senders are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def sender_options(transport: str, directory: Path) -> dict[str, Any]:
    """``directory`` is the test's own."""
    return {"url": str(directory)} if transport in ("disk", "disk_delta") else {}
