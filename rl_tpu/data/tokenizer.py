"""The tokenizer of a Hugging Face model directory, and whether the directory is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_tpu.errors import UserError
from rl_tpu.registry import one_line

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def check_model_directory(model_dir: str | Path) -> Path:
    """The directory, if it holds config.json, a tokenizer and safetensors weights; else UserError names what is not."""
    path = Path(model_dir).expanduser()
    if not path.is_dir():
        state = "is not a directory" if path.exists() else "does not exist"
        raise UserError(f"model directory {path} {state}; it must be a downloaded or made Hugging Face model")
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    missing += _missing_weights(path)
    if missing:
        raise UserError(f"model directory {path} lacks {', '.join(missing)}")
    return path


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer of a whole model directory. UserError if a part or the chat template is missing or broken."""
    from transformers import AutoTokenizer

    path = check_model_directory(model_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # broken JSON, unknown classes, missing packages: all of them bad input
        raise UserError(f"cannot load the tokenizer in {path}: {one_line(error)}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {path} has no chat template: add chat_template.jinja, or chat_template to "
            "tokenizer_config.json (base models often come without one)"
        )
    return tokenizer


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(path.glob("*.safetensors")) else ["weights (*.safetensors)"]
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is not a safetensors index: {one_line(error)}") from error
    return [f"{shard} (named in {index.name})" for shard in shards if not (path / shard).is_file()]
