"""The wheel: configuration and examples inside, and a dry run in an environment of its own, from another directory."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(directory)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    return next(directory.glob("*.whl"))


def test_the_wheel_holds_configuration_and_examples(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("configs/train.yaml", "configs/experiment/quickstart.yaml", "examples/quickstart/warmup.py"):
        assert f"rl_tpu/{name}" in names
    assert "weight_sync/manifest.py" in names
    assert not any(name.startswith(("tests/", "configs/", "examples/")) for name in names)


def test_the_installed_wheel_dry_runs_anywhere(wheel, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=300)
    python = environment / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=300)
    # The dependencies are those of this environment, behind the wheel's own files; the checkout is not among them.
    site = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    link = next((environment / "lib").glob("python*/site-packages")) / "dependencies.pth"
    link.write_text(f"{site}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for experiment in ("quickstart", "qwen3_4b_dapo"):
        command = [str(python), "-m", "rl_tpu.train", f"+experiment={experiment}", "dry_run=true"]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert "nothing was started" in done.stdout
    where = subprocess.run(
        [str(python), "-c", "import rl_tpu; print(rl_tpu.__file__)"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(environment))
