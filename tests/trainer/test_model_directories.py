"""Which Hugging Face directories the trainer takes, how it says no, and what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import make_samples, one_rank, predictions, tiny_qwen3, transformers_logprobs
from transformers import AutoTokenizer, Qwen3ForCausalLM

from rl_tpu.errors import UserError
from rl_tpu.trainer.export import stored_dtypes
from rl_tpu.trainer.packing import pack


@pytest.fixture
def copy(model_dir, tmp_path) -> Path:
    """A directory to spoil."""
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught, one_rank(directory):
        pass
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_readable_config_is_refused(copy, tmp_path):
    refused(tmp_path, "cannot read .*config.json")
    (copy / "config.json").write_text("{")
    refused(copy, "is not JSON")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is unknown; known: .*Qwen3ForCausalLM"),
        ({"architectures": ...}, r"\(none named\) is unknown"),
        ({"num_key_value_heads": ...}, "config.json has no 'num_key_value_heads'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "of type 'yarn'"),
    ],
)
def test_what_no_family_computes_is_refused(copy, changes, message):
    edit_config(copy, **changes)
    refused(copy, message)


def test_weights_that_are_missing_or_misfit_are_refused(copy):
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    whole = weights.pop(name)
    save_file(weights, copy / "model.safetensors")
    refused(copy, f"cannot load the weights of .*{name}")
    save_file(weights | {name: whole[:100].clone()}, copy / "model.safetensors")
    refused(copy, f"cannot load the weights of .*{name}")
    (copy / "model.safetensors").write_bytes(b"not safetensors")
    refused(copy, "cannot load the weights of")
    (copy / "model.safetensors").unlink()
    refused(copy, "cannot load the weights of")


def test_a_refused_directory_leaves_the_process_usable(copy, model_dir):
    edit_config(copy, attention_bias=True)
    refused(copy, "attention_bias")
    with one_rank(model_dir) as trainer:
        assert trainer.ranks == 1


def test_weights_in_several_files_and_an_older_config_are_read(copy):
    Qwen3ForCausalLM.from_pretrained(copy).save_pretrained(copy, max_shard_size="50KB")
    (copy / "model.safetensors").unlink(missing_ok=True)
    assert len(list(copy.glob("*.safetensors"))) > 2
    edit_config(copy, rope_parameters=..., rope_theta=10000.0, head_dim=16)
    with one_rank(copy) as trainer:
        tensors = trainer.full_tensors()
    theirs = tiny_qwen3(True).state_dict()
    assert all(torch.equal(tensors[name], theirs[name]) for name in tensors)


def test_a_bfloat16_model_is_trained_in_bfloat16_and_exported_as_such(copy, tmp_path, byte_tokenizer):
    model = tiny_qwen3(True).bfloat16()
    model.save_pretrained(copy)
    byte_tokenizer.save_pretrained(copy)
    samples = make_samples(8)
    batch = pack(samples, [64], 1, 128)
    exact = model.float()
    with one_rank(copy, param_dtype="bfloat16") as trainer:
        logprobs = trainer.logprobs(batch)
        assert {tensor.dtype for tensor in trainer.full_tensors().values()} == {torch.float32}
        trainer.update(batch)
        after = trainer.full_tensors()
        trainer.export_hf(tmp_path / "hf")
        trainer.export_hf(tmp_path / "hf")  # replaces what is there
    for index, sample in enumerate(samples):
        theirs = torch.tensor(transformers_logprobs(exact, sample))
        ours = logprobs[predictions(batch, index, sample)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1)  # transformers' own bfloat16 is off by 0.05
    assert set(stored_dtypes(tmp_path / "hf").values()) == {torch.bfloat16}
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in after.items())
    text = [{"role": "user", "content": "What is 2 + 2?"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.apply_chat_template(text) == byte_tokenizer.apply_chat_template(text)
