"""Tools by name or import path: subclasses of Tool, and plain functions with type hints and a docstring."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from transformers.utils import get_json_schema

from rl_tpu.environments.calling import call
from rl_tpu.environments.tool import Tool, ToolError
from rl_tpu.errors import UserError
from rl_tpu.registry import check_options, describe, lookup, nearest, one_line

TOOLS = {
    "calculator": "rl_tpu.environments.tools.calculator:Calculator",
    "python": "rl_tpu.environments.tools.python:Python",
}


class FunctionTool(Tool):
    """A function, sync or async; what the policy sees of it follows from its type hints and its docstring (Google style)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.schema = get_json_schema(function)
        self.name = self.schema["function"]["name"]
        self._function = function

    async def call(self, **arguments: Any) -> str:
        result = await call(lambda: self._function(**arguments))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def make_tools(entries: Sequence[str | Mapping[str, Any]]) -> dict[str, Tool]:
    """By the name that the policy calls. An entry is a name or an import path, or a mapping ``{name, options}``.

    Raises UserError for an unknown tool, options that it does not take, a schema that is none, and a name given twice.
    """
    tools: dict[str, Tool] = {}
    for entry in entries:
        tool = _make(*_name_and_options(entry))
        if tool.name in tools:
            raise UserError(f"environment.options.tools: two tools are called {tool.name!r}")
        tools[tool.name] = tool
    if not tools:
        raise UserError("environment.options.tools: name at least one tool")
    return tools


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError, in one line for the policy, unless the arguments fit the tool's schema.

    Names that the schema does not list are refused, unless it says otherwise (``additionalProperties``).
    """
    parameters = {"additionalProperties": False, **tool.schema["function"]["parameters"]}
    try:
        error = best_match(Draft202012Validator(parameters).iter_errors(dict(arguments)))
    except RecursionError:
        raise ToolError(f"wrong arguments of {tool.name}: nested too deeply") from None
    if error is not None:
        where = f"argument {error.path[0]}: " if error.path else ""
        raise ToolError(f"wrong arguments of {tool.name}: {where}{one_line(error.message)}")


def _name_and_options(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    if not (isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and set(entry) <= {"name", "options"}):
        raise UserError(
            f"environment.options.tools: {entry!r} is neither a name, an import path nor a mapping with name and options"
        )
    return entry["name"], dict(entry.get("options") or {})


def _make(name: str, options: dict[str, Any]) -> Tool:
    found = lookup("tool", name, TOOLS)
    if isinstance(found, type) and issubclass(found, Tool):
        check_options("tool", name, found, (), options)
        make = lambda: found(**options)  # noqa: E731
    elif callable(found) and not isinstance(found, type):
        if options:
            raise UserError(f"tool {name!r} is a function and takes no options; a subclass of Tool does")
        make = lambda: FunctionTool(found)  # noqa: E731
    else:
        raise UserError(f"tool {name!r} is neither a subclass of rl_tpu.environments.Tool nor a function")
    try:
        tool = make()
        Draft202012Validator.check_schema(tool.schema["function"]["parameters"])
    except UserError:
        raise
    except SchemaError as error:
        raise UserError(f"tool {name!r}: its parameters are no JSON schema: {one_line(error.message)}") from error
    except Exception as error:  # no type hints or docstring, or whatever its constructor says
        raise UserError(f"tool {name!r} cannot be made: {describe(error)}") from error
    return tool


def unknown_tool(name: str, tools: Mapping[str, Tool]) -> str:
    """One line for a policy that calls a tool that there is not."""
    return f"there is no tool {name!r}{nearest(name, tools)} Tools: {', '.join(tools)}"
