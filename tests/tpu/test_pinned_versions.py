"""Private interfaces are used of known versions alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_tpu.errors import UserError
from rl_tpu.tpu import torch_tpu

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "found"), [("torch_tpu", torch_tpu.PINNED["torch_tpu"]), ("no_such_package", "not installed")]
)
def test_another_version_is_one_clear_line(monkeypatch, package, found):
    monkeypatch.setattr(torch_tpu, "PINNED", {package: "9.9.9"})
    with pytest.raises(UserError, match=re.escape(f"{package} 9.9.9 is needed")) as caught:
        torch_tpu.check_versions()
    assert f"is {found}: pip install {package}==9.9.9" in str(caught.value)


def test_the_environments_have_these_versions():
    torch_tpu.check_versions()
    for path, form in (("requirements/cpu.txt", "{}=={} "), ("pyproject.toml", '"{}=={}"')):
        text = (ROOT / path).read_text()
        assert all(form.format(*pin) in text for pin in torch_tpu.PINNED.items()), path


def test_private_interfaces_are_in_one_module():
    private = re.compile(r"^\s*(from|import) (torch_tpu|jax)\._\w+", re.MULTILINE)
    users = {path.name for path in (ROOT / "rl_tpu").rglob("*.py") if private.search(path.read_text())}
    assert users == {"torch_tpu.py"}
