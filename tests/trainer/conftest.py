"""Model directories that all tests of the trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policy import tiny_qwen3

from rl_tpu.devices import get_device, prepare_torchtitan

prepare_torchtitan(get_device("cpu"))  # a test may import a part of the trainer before it makes one


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> dict[bool, Path]:
    """Hugging Face directories of the tied and the untied model, by `tied`."""
    root = tmp_path_factory.mktemp("models")
    directories = {tied: root / ("tied" if tied else "untied") for tied in (True, False)}
    for tied, directory in directories.items():
        tiny_qwen3(tied).save_pretrained(directory)
    return directories


@pytest.fixture(scope="session")
def model_dir(model_dirs) -> Path:
    return model_dirs[True]
