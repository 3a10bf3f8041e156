"""The commands and the mixture of docs/data.md compose."""

import re
import shlex
from pathlib import Path

import pytest

from rl_tpu.config.compose import check_command_line, load_config

GUIDE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
COMMANDS = re.findall(r"^python -m rl_tpu\.train (.*?[^\\])$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command):
    check_command_line(shlex.split(command.replace("\\\n", " ")))


def test_all_commands_are_found():
    assert len(COMMANDS) == GUIDE.count("python -m rl_tpu.train ") == 4


def test_a_mixture_of_ones_own(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    train = load_config(["+experiment=qwen3_4b_dapo", "data=mine"], [str(tmp_path)]).data.train
    assert {name: source.weight for name, source in train.sources.items()} == {"gsm8k": 3, "sums": 1, "own": 0.5}
    assert (train.sources["sums"].size, train.sources["gsm8k"].prompt_field) == (5000, "question")
