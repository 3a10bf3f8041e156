"""Environments: how a prompt becomes samples."""

from rl_tpu.environments.base import Environment, Generate
from rl_tpu.environments.registry import find_environment, make_environment
from rl_tpu.environments.transcript import Transcript

__all__ = ["Environment", "Generate", "Transcript", "find_environment", "make_environment"]
