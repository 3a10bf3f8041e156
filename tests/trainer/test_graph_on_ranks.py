"""Programs with collectives in them, on two ranks, against FSDP2's eager ones there; and what is saved, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import family_model
from graph_program import ALGORITHM, batch, optimizer_config
from ranks import close, equal, far, run_ranks
from tiny_policy import one_rank

PROGRAM = Path(__file__).with_name("graph_program.py")


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("qwen3 tied", "adamw"),
        pytest.param("qwen3", "muon", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "muon", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_what_they_do_eagerly(tmp_path, model, optimizer):
    """With a vocabulary of 257 the second rank's part of the embedding is filled up."""
    model_dir = tmp_path / "model"
    family_model(model).save_pretrained(model_dir)
    run_ranks(2, [model_dir, optimizer, tmp_path], tmp_path, PROGRAM)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    eager, graph = (ranks[0][mode] for mode in ("eager", "graph"))
    tolerance = 1e-5 if optimizer == "adamw" else 1e-4  # Muon rounds to bfloat16
    for ours, theirs in zip(graph["metrics"], eager["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reference_kl", "approx_kl", "loss_tokens", "skipped_updates"):
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=10 * tolerance, abs=tolerance), (
                name
            )
    assert close(graph["gradient"], eager["gradient"], 1e-5)
    for state in ("after", "next"):
        assert far(graph[state], eager[state]) < tolerance, state
    assert equal(graph["published"], graph["after"])
    for result in ranks:
        ours, theirs = result["graph"], result["eager"]
        for name in ("reference", "refreshed", "logprobs"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=100 * tolerance, msg=name)
        torch.testing.assert_close(ours["refreshed"], ours["logprobs"], rtol=0, atol=1e-5)
        assert not torch.equal(ours["reference"], ours["logprobs"])
    # The eager ranks' checkpoint goes on in programs.
    assert equal(graph["loaded"], eager["after"])
    assert far(graph["next of other"], eager["next"]) < tolerance
    # The programs' checkpoint, read by one rank.
    with one_rank(model_dir, ALGORITHM, optimizer=optimizer_config(optimizer)) as trainer:
        trainer.load(tmp_path / "graph")
        assert equal(trainer.full_tensors(), graph["after"])
        alone = trainer.logprobs(batch(2))
    both = torch.cat([result["graph"]["logprobs"] for result in ranks])
    torch.testing.assert_close(alone, both, rtol=0, atol=1e-5)
