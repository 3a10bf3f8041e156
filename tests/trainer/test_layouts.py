"""A checkpoint goes from layout to layout unchanged, each goes on from it as one rank does, and publishes it whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layouts_program import visit
from ranks import close, equal, run_ranks
from tiny_policy import make_samples, one_rank, tiny_qwen3

from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.errors import UserError
from rl_tpu.trainer.packing import pack

PROGRAM = Path(__file__).with_name("layouts_program.py")
ON_TWO = [{}, {"parallel": {"tensor": 2}}, {"parallel": {"replicas": 2}}, {"parallel": {"sharding": "simple_fsdp"}}]
ON_FOUR = [
    {"parallel": {"replicas": 2}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"tensor": 2, "replicas": 2}},
    {"parallel": {"tensor": 2, "sharding": "simple_fsdp"}},
]


def travel(ranks: int, layouts: list[dict], model_dir: Path, out: Path) -> None:
    """One rank, then the layouts on as many ranks, then one rank again, beside one rank all the way."""
    batch = pack(make_samples(14), [64], ranks, 128)
    torch.save(batch.tensors(), out / "batch.pt")
    alone, last = [], None
    for step in range(len(layouts) + 2):
        place = out / f"alone-{step}"
        alone.append(visit(batch, model_dir, last, place, {}, None))
        last = place
    arguments = [out / "batch.pt", model_dir, out / "alone-0", out, *map(json.dumps, layouts)]
    run_ranks(ranks, arguments, out, PROGRAM)
    steps = torch.load(out / "results.pt")
    steps.append(visit(batch, model_dir, out / f"checkpoint-{len(layouts) - 1}", out / "last", {}, None))
    before = alone[0]["after"]
    for settings, step, expected in zip([*layouts, {}], steps, alone[1:], strict=True):
        assert equal(step["loaded"], before), settings
        assert equal(step["published"], {name: tensor.bfloat16() for name, tensor in before.items()}), settings
        assert close(step["after"], expected["after"], 1e-4), settings
        for name in ("loss", "grad_norm", "learning_rate", "ratio_max"):
            assert step["metrics"][f"train/{name}"] == pytest.approx(expected["metrics"][f"train/{name}"], rel=1e-4)
        before = step["after"]


@pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.slow)]
)
def test_two_ranks_in_every_layout(tied, model_dirs, tmp_path):
    travel(2, ON_TWO, model_dirs[tied], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_four_ranks_in_every_layout(tied, tmp_path):
    tiny_qwen3(tied, vocabulary=260).save_pretrained(tmp_path / "model")
    travel(4, ON_FOUR, tmp_path / "model", tmp_path)


@pytest.mark.slow
def test_sizes_that_are_gathered_wrongly_are_refused(model_dir, tmp_path):
    torch.save(pack(make_samples(4), [64], 2).tensors(), tmp_path / "batch.pt")
    arguments = [tmp_path / "batch.pt", model_dir, tmp_path, tmp_path, json.dumps({"parallel": {"tensor": 2}})]
    with pytest.raises(AssertionError, match=r"257 rows of .* do not divide into tensor 2 x 2 shards"):
        run_ranks(4, arguments, tmp_path, PROGRAM)


def test_heads_that_the_ranks_cannot_share_are_refused(model_dir):
    from rl_tpu.trainer.model import check_heads, model_spec, read_config

    with pytest.raises(UserError, match="tensor: 4 ranks cannot share the 4 heads and 2 key-value heads of"):
        check_heads(model_spec(read_config(model_dir), 64).model, 4, model_dir)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_steps_too_small_for_bfloat16_move_the_weights(param_dtype, model_dir):
    optimizer = OptimizerConfig(learning_rate=1e-6)
    with one_rank(model_dir, param_dtype=param_dtype, optimizer=optimizer) as trainer:
        before = trainer.full_tensors()["model.layers.0.mlp.up_proj.weight"]
        trainer.update(pack(make_samples(8), [64], 1, 128))
        after = trainer.full_tensors()["model.layers.0.mlp.up_proj.weight"]
    moved = (after != before).float().mean()
    assert after.dtype == torch.float32
    assert moved > 0.95
    only = torch.nn.Parameter(before.bfloat16())
    only.grad = (before - after).bfloat16()
    torch.optim.AdamW([only], lr=1e-6, weight_decay=0.0).step()
    assert (only != before.bfloat16()).float().mean() < 0.1
