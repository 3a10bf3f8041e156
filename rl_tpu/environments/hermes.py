"""Calls of tools as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FORM = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True)
class Call:
    """``arguments`` is None where the call cannot be understood; ``error`` then says why, in one line for the policy."""

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None


def parse_calls(text: str) -> tuple[str, list[Call]]:
    """What a turn says outside of its calls, and its calls in order.

    Calls are looked for after the last ``</think>``: what is weighed in reasoning is not meant.
    """
    start = text.rfind("</think>") + 1
    calls = [_parse(found[1], closed=found[2] == "</tool_call>") for found in _CALL.finditer(text, start)]
    return (text[:start] + _CALL.sub("", text[start:])).strip(), calls


def _parse(text: str, closed: bool) -> Call:
    if not closed:
        return Call("", None, "<tool_call> without </tool_call>")
    try:
        value = json.loads(text, strict=False)  # models put line breaks into strings of code
    except (ValueError, RecursionError) as error:
        return Call("", None, f"the call is no JSON ({error}); it must be {_FORM}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", None, f"the call has no name; it must be {_FORM}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(value["name"], None, f"the arguments of {value['name']} are no JSON object; it must be {_FORM}")
    return Call(value["name"], arguments)
