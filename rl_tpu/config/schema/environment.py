"""From a prompt to samples."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_tpu.config.schema.base import Section


class EnvironmentConfig(Section):
    """How a prompt becomes a sample."""

    name: str = "single_turn"
    """A registered name, or an import path `package.module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
