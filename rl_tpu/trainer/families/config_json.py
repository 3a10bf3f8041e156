"""Reading a model's config.json: every setting is checked where it is read, and a bad one ends in one line."""

from __future__ import annotations

import math
from typing import Any

from rl_tpu.errors import UserError

_REQUIRED = object()


class ConfigJson:
    """The settings of a Hugging Face config.json. An absent setting and one that is null are the same.

    Every method raises UserError, naming the setting, where it is missing without a default or of another type.
    """

    def __init__(self, settings: dict[str, Any], architecture: str):
        self.settings, self.architecture = settings, architecture

    def count(self, name: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        return self._read(name, default, "a positive integer", lambda value: _is_integer(value) and value > 0)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A positive number."""
        return float(self._read(name, default, "a positive number", _is_positive))

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        return self._read(name, default, "true or false", lambda value: isinstance(value, bool))

    def indices(self, name: str) -> list[int]:
        """A list of integers, empty by default."""
        return self._read(name, [], "a list of integers", lambda v: isinstance(v, list) and all(map(_is_integer, v)))

    def only(self, computed: dict[str, Any]) -> None:
        """Refuse any setting that says otherwise than `computed`, what the trainer computes with."""
        for name, value in computed.items():
            if (found := self._read(name, value)) != value:
                self.refuse(f"{name} = {found!r}; the trainer supports only {value!r}")

    def full_attention(self) -> None:
        """Refuse attention that does not see the whole sample."""
        self.only({"use_sliding_window": False})
        kinds = self._read("layer_types", [], "a list", lambda value: isinstance(value, list))
        if others := sorted({str(kind) for kind in kinds} - {"full_attention"}):
            self.refuse(f"layer_types with {', '.join(others)}; the trainer supports only 'full_attention'")

    def rope(self) -> tuple[str, ConfigJson]:
        """Kind of the rotary embedding ("default" where none is named) and its settings, `rope_theta` among them.

        transformers 5 writes all of them as `rope_parameters`; before, the base stood in config.json itself and the rest
        in `rope_scaling`.
        """
        for place in ("rope_parameters", "rope_scaling"):
            if settings := self._read(place, {}, "an object", lambda value: isinstance(value, dict)):
                break
        if any(isinstance(value, dict) for value in settings.values()):
            self.refuse(f"{place} = {settings!r}; the trainer supports only one rotary embedding for all layers")
        merged = {"rope_theta": self.settings.get("rope_theta")} | settings
        rope = ConfigJson(merged, self.architecture)
        rope.only({"partial_rotary_factor": 1.0})
        self.only({"partial_rotary_factor": 1.0})
        return merged.get("rope_type") or merged.get("type") or "default", rope

    def refuse(self, what: str) -> None:
        raise UserError(f"model.path: config.json has {what}")

    def _read(self, name: str, default: Any, kind: str = "", valid: Any = None) -> Any:
        value = self.settings.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"model.path: config.json has no {name!r}, which {self.architecture} needs")
            return default
        if valid is not None and not valid(value):
            self.refuse(f"{name} = {value!r}; it has to be {kind}")
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
