"""The commands of docs/rewards.md are accepted."""

import re
import shlex
from pathlib import Path

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.inputs import check_names
from rl_tpu.rewards.registry import REWARDS

GUIDE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
COMMANDS = re.findall(r"^    python -m rl_tpu\.train ((?:.*\\\n)*.*)$", GUIDE, re.MULTILINE)


def test_every_reward_is_documented():
    assert len(COMMANDS) >= 10
    assert [name for name in REWARDS if f"\n| `{name}` |" not in GUIDE] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command):
    check_names(load_config(shlex.split(command.replace("\\\n", " "))))
