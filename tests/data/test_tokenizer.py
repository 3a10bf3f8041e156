"""A model directory is whole, or the message says what it lacks."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rl_tpu.data import load_tokenizer
from rl_tpu.errors import UserError


@pytest.fixture
def model_dir(tmp_path, byte_tokenizer):
    path = tmp_path / "model"
    byte_tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"w": torch.zeros(1)}, path / "model.safetensors")
    return path


def refused(path):
    with pytest.raises(UserError) as error:
        load_tokenizer(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_whole_directory_gives_the_same_tokenizer(model_dir, byte_tokenizer):
    loaded = load_tokenizer(model_dir)
    messages = [{"role": "user", "content": "1 + 1 = é?"}]
    assert loaded.apply_chat_template(messages) == byte_tokenizer.apply_chat_template(messages)
    assert loaded.eos_token == "<|im_end|>"


def test_what_is_missing_is_named(model_dir):
    (model_dir / "model.safetensors").unlink()
    assert "lacks weights" in refused(model_dir)
    (model_dir / "config.json").unlink()
    (model_dir / "tokenizer.json").unlink()
    message = refused(model_dir)
    assert all(part in message for part in ("config.json", "tokenizer.json", "safetensors"))


def test_missing_shard_is_named(model_dir):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_dir / "model.safetensors").rename(model_dir / "model-1.safetensors")
    message = refused(model_dir)
    assert "model-2.safetensors" in message
    assert "model-1.safetensors" not in message
    (model_dir / "model.safetensors.index.json").write_text("{")
    assert "not a safetensors index" in refused(model_dir)


def test_no_directory(tmp_path):
    assert "does not exist" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "not a directory" in refused(tmp_path / "file")


def test_broken_tokenizer(model_dir):
    (model_dir / "tokenizer.json").write_text("{broken")
    assert "cannot load the tokenizer" in refused(model_dir)


def test_no_chat_template(model_dir):
    (model_dir / "chat_template.jinja").unlink()
    assert "no chat template" in refused(model_dir)
