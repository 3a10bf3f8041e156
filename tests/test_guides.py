"""Every training command that the README, the guides and the examples print is accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_tpu.config.compose import check_command_line, load_config
from rl_tpu.orchestrator.inputs import check_names

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
# To the end of the line, or of an inline command; a backslash goes on in the next line.
COMMAND = re.compile(r"python -m rl_tpu\.train ((?:[^`\n]*\\\n)*[^`\n]*)")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where a command stands, and its arguments."""
    for guide in GUIDES:
        for found in COMMAND.finditer(guide.read_text()):
            arguments = shlex.split(found[1].replace("\\\n", " "), comments=True)
            yield f"{guide.relative_to(ROOT)}: {' '.join(arguments)}", arguments


COMMANDS = dict(commands())


def test_all_guides_have_been_searched():
    assert len(COMMANDS) > 30
    assert {name.partition(":")[0] for name in COMMANDS} >= {"README.md", "docs/rewards.md", "docs/data.md"}


@pytest.mark.parametrize("name", COMMANDS)
def test_command(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # as where a user starts it: rewards and objectives of the examples
    arguments = COMMANDS[name]
    if "--config-dir" in arguments:  # the experiment that stands above the command
        mine = tmp_path / "my_configs" / "experiment" / "mine.yaml"
        mine.parent.mkdir(parents=True)
        mine.write_text(re.search(r"```yaml\n(.*?)```", (ROOT / name.partition(":")[0]).read_text(), re.DOTALL)[1])
        monkeypatch.chdir(tmp_path)
    if {"-m", "--config-dir"} & set(arguments):
        check_command_line(arguments)
    else:
        check_names(load_config(arguments))
