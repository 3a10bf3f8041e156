"""Muon does the same on one rank and on several, and a step that one rank cannot take is taken by none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from optimizer_program import exercise
from ranks import run_ranks

PROGRAM = Path(__file__).with_name("optimizer_program.py")


@pytest.fixture(scope="module")
def one(model_dir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one")
    exercise(model_dir, out, {})
    return out


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {}),
        (2, {"tensor": 2}),
        pytest.param(2, {"sharding": "simple_fsdp"}, marks=pytest.mark.slow),
        pytest.param(4, {"replicas": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"replicas": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "tensor", "simple_fsdp", "hsdp", "tensor_replicas"],
)
def test_muon_a_skipped_step_and_checkpoints_on_several_ranks(one, model_dir, tmp_path, ranks, parallel):
    shutil.copytree(one / "checkpoint", tmp_path / "other")
    run_ranks(ranks, [model_dir, json.dumps(parallel), tmp_path], tmp_path, PROGRAM)
    alone = torch.load(one / "rank-0.pt")
    results = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(ranks)]
    ours = results[0]
    assert ours["metrics"] == pytest.approx(alone["metrics"])
    for state in ("after", "next"):
        assert all(torch.equal(ours[state][name], alone[state][name]) for name in alone[state]), state
    for name in ("again", "from_other"):
        assert all(torch.equal(ours[name][key], ours["next"][key]) for key in ours["next"]), name
        for result in results:
            torch.testing.assert_close(result[f"reference_{name}"], result["reference"], rtol=0, atol=1e-5)
    replicas = parallel.get("replicas", 1)
    assert sum(result["holds_nan"] for result in results) == replicas, "one rank of those that share the policy"
    for result in [*results, alone]:
        assert result["skipped"]["skipped_updates"] == 1
        assert math.isnan(result["skipped"]["grad_norm"])
        assert result["compared"] > 60
        assert result["changed"] == []
