"""Hugging Face directories: whole, in the model's own types, with everything that makes weights a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from family_models import by_saved_name, family_model
from tiny_policy import make_samples, one_rank, tiny_qwen3
from transformers import AutoModelForCausalLM, GenerationConfig

from rl_tpu.errors import UserError
from rl_tpu.orchestrator.export_command import export
from rl_tpu.trainer.export import full_tensors, stored_dtypes, write_hf
from rl_tpu.trainer.packing import pack

FAMILIES = ("qwen3", "qwen3 tied", "qwen3_moe", "llama")


@pytest.fixture(params=FAMILIES)
def source(request, tmp_path) -> Path:
    """A model directory in bfloat16, but for one norm, with generation settings and a tokenizer's files."""
    model = family_model(request.param, generation_config=None).to(torch.bfloat16)
    model.model.norm.float()
    model.generation_config = GenerationConfig(eos_token_id=[7, 9], pad_token_id=3, temperature=0.6, do_sample=True)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "model"


def test_an_exported_policy_is_a_model_of_the_same_kind(source, tmp_path):
    out = tmp_path / "out"
    with one_rank(source) as trainer:
        trainer.update(pack(make_samples(6), [64], 1, 128))
        expected = trainer.full_tensors()
        trainer.export_hf(out)
    dtypes = stored_dtypes(source)
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert stored_dtypes(out) == dtypes
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [7, 9]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs = by_saved_name(model, model.state_dict())
    assert theirs.keys() - expected.keys() <= {"lm_head.weight"}
    for name, tensor in expected.items():
        assert torch.equal(theirs[name], tensor.to(dtypes[name]).float()), name


def test_large_models_are_spread_over_files_with_an_index(model_dir, tmp_path):
    out = tmp_path / "out"
    with one_rank(model_dir) as trainer:
        expected = trainer.full_tensors()
        write_hf(out, full_tensors(trainer.policy, keep=True), model_dir, file_bytes=100_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert all((out / file).stat().st_size < 110_000 for file in files)
    theirs = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())
    with one_rank(out) as trainer:  # and is a model to start from
        again = trainer.full_tensors()
        write_hf(out, full_tensors(trainer.policy, keep=True), out)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    assert sorted(path.name for path in out.glob("model*")) == ["model.safetensors"], "replaced, and in one file"


def test_a_checkpoint_becomes_a_hugging_face_directory(source, tmp_path, capsys):
    checkpoint, out = tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "out"
    with one_rank(source, activation_checkpointing="full") as trainer:
        trainer.update(pack(make_samples(6), [64], 1, 128))
        trainer.save(checkpoint / "trainer")
        trainer.export_hf(tmp_path / "expected")
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(UserError, match="say with model=DIR"):
        export([f"checkpoint={checkpoint}", f"out={out}"])
    for unfit in ("name: x", "model: [", "- model"):
        (tmp_path / "run" / "config.yaml").write_text(unfit)
        with pytest.raises(UserError, match=r"config\.yaml does not name the run's model .* model=DIR"):
            export([f"checkpoint={checkpoint}", f"out={out}"])
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {source}}}")
    export([f"checkpoint={checkpoint}", f"out={out}"])
    assert capsys.readouterr().out == f"written to {out}\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()
    }
    with pytest.raises(UserError, match="exists already"):
        export([f"checkpoint={checkpoint}", f"out={out}"])
    shutil.rmtree(out)
    export([f"checkpoint={checkpoint}", f"out={out}", f"model={source}"])
    assert (out / "model.safetensors").is_file()


def test_what_is_no_checkpoint_is_not_exported(model_dir, tmp_path):
    with pytest.raises(UserError, match=r"it has no state\.json"):
        export([f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}"])
    with pytest.raises(UserError, match=r"usage: python -m rl_tpu\.export"):
        export(["checkpoint"])
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"it has no trainer/\.metadata"):
        export([f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}"])
    with one_rank(model_dir) as trainer:
        trainer.save(tmp_path / "trainer")
    tiny_qwen3(True, vocabulary=300).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="is not a checkpoint of this model"):
        export([f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}", f"model={tmp_path / 'other'}"])
    assert not (tmp_path / "out").exists()
