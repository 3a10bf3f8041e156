"""Environments by name or import path."""

from __future__ import annotations

from typing import Any

from rl_tpu.config.schema import EnvironmentConfig
from rl_tpu.environments.base import Environment
from rl_tpu.errors import UserError
from rl_tpu.registry import check_options, describe, lookup

ENVIRONMENTS = {
    "single_turn": "rl_tpu.environments.single_turn:SingleTurn",
    "multi_turn": "rl_tpu.environments.multi_turn:MultiTurn",
    "tools": "rl_tpu.environments.tool_use:ToolUse",
    "openai_agent": "rl_tpu.environments.agent.openai_agent:OpenAIAgent",
    "verifiers": "rl_tpu.environments.agent.verifiers_tasks:VerifiersTasks",
}


def find_environment(config: EnvironmentConfig) -> type[Environment]:
    """The configured class. Raises UserError for an unknown name, a class of another kind, and wrong options."""
    found = lookup("environment", config.name, ENVIRONMENTS)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise UserError(f"environment {config.name!r} is no subclass of rl_tpu.environments.Environment")
    check_options("environment", config.name, found, ("tokenizer",), config.options)
    return found


def make_environment(config: EnvironmentConfig, tokenizer: Any) -> Environment:
    """The configured environment. Raises UserError as `find_environment` does, and if its constructor raises."""
    found = find_environment(config)
    try:
        return found(tokenizer, **config.options)
    except UserError:
        raise
    except Exception as error:  # no `run`, or whatever its constructor says about the options
        raise UserError(f"environment {config.name!r} cannot be made: {describe(error)}") from error
