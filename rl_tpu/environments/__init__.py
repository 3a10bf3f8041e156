"""Environments: how a prompt becomes samples."""

from rl_tpu.environments.base import Environment, Generate
from rl_tpu.environments.chat import Chat
from rl_tpu.environments.conversation import Conversation, Progress, Reply
from rl_tpu.environments.registry import find_environment, make_environment
from rl_tpu.environments.tool import Tool, ToolError
from rl_tpu.environments.transcript import Transcript

__all__ = [
    "Chat",
    "Conversation",
    "Environment",
    "Generate",
    "Progress",
    "Reply",
    "Tool",
    "ToolError",
    "Transcript",
    "find_environment",
    "make_environment",
]
