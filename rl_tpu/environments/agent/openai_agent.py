"""Agents that speak the OpenAI API, and know nothing of their training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from rl_tpu.environments.agent.base import AgentEnvironment
from rl_tpu.environments.agent.command import run_command
from rl_tpu.environments.agent.responses import MODEL
from rl_tpu.environments.calling import call
from rl_tpu.errors import UserError
from rl_tpu.registry import lookup
from rl_tpu.types import Prompt

GIVEN = ("base_url", "api_key", "model", "prompt", "messages", "answer", "metadata")
"""Arguments that an agent's function may ask for by name."""


class OpenAIAgent(AgentEnvironment):
    """``agent`` is a function, ``package.module:function``, sync or async; ``command`` is a program with its arguments.

    The function is called once per sample with those of ``base_url``, ``api_key``, ``model``, ``messages`` (the prompt's,
    a list of dicts), ``answer``, ``metadata`` and ``prompt`` (all of it, `rl_tpu.types.Prompt`) that it has parameters for,
    and with ``agent_options``. It returns what `outcome_of` says. An async one runs on the driver's event loop, which it
    must not block; a sync one in a thread, which cannot be stopped when it is late.

    The command gets ``id``, ``messages``, ``answer`` and ``metadata`` as a JSON object on its standard input, and
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. A reward is its last line, ``{"reward": 1.0}``.

    The other options are those of `AgentEnvironment`.
    """

    def __init__(
        self,
        tokenizer: Any,
        agent: str | None = None,
        command: list[str] | None = None,
        agent_options: dict[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(tokenizer, **common)
        if (agent is None) == (command is None):
            raise UserError(
                "give one of the options agent=package.module:function and command=[program, argument, ...]"
            )
        if command is not None and agent_options:
            raise UserError("agent_options are for a function; give a command its arguments")
        if command == []:
            raise UserError("command has no program")
        self._command = command
        self._agent_options = agent_options or {}
        self._function = lookup("agent", agent, {}) if agent else None
        self._wanted = _wanted(agent, self._function, self._agent_options) if agent else ()

    async def play(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        task = {"messages": [dict(message) for message in prompt.messages], "answer": prompt.answer}
        task |= {"metadata": dict(prompt.metadata)}
        if self._command:
            environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
            return await run_command(self._command, {"id": prompt.id, **task}, environment)
        given: Mapping[str, Any] = task | {"base_url": base_url, "api_key": api_key, "model": MODEL, "prompt": prompt}
        return await call(
            partial(self._function, **{name: given[name] for name in self._wanted}, **self._agent_options)
        )


def _wanted(agent: str, function: Any, options: Mapping[str, Any]) -> list[str]:
    """Which of `GIVEN` a function has parameters for. Raises UserError if it cannot be called with them and ``options``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"agent {agent!r} is not callable") from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    wanted = [name for name in GIVEN if (takes_all or name in names) and name not in options]
    try:
        inspect.signature(function).bind(**dict.fromkeys(wanted), **options)
    except TypeError as error:
        raise UserError(
            f"agent {agent!r} cannot be called: {error}; it gets {', '.join(GIVEN)}, as far as it has parameters of these"
            " names, and agent_options"
        ) from None
    return wanted
