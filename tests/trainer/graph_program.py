"""What every rank does in test_graph_on_ranks.py: `python graph_program.py MODEL_DIR OPTIMIZER OUT_DIR`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gradients_program import gradient
from ranks_program import published
from tiny_policy import make_samples, trainer_config

from rl_tpu.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch

ALGORITHM = AlgorithmConfig(kl=KLConfig(coefficient=0.1), aggregation="sample_mean")


def optimizer_config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=1e-3, weight_decay=0.1)


def batch(ranks: int) -> PackedBatch:
    rows = pack(make_samples(12), [64], ranks, 128)
    rows.reference_logprobs = rows.sampler_logprobs
    return rows


def exercise(mode: str, model_dir: Path, optimizer: str, out: Path, store: dist.Store | None = None) -> dict:
    """What one rank says of its policy; checkpoints go to OUT_DIR/MODE."""
    config = trainer_config(execution={"mode": mode}, optimizer=optimizer_config(optimizer))
    trainer = PolicyTrainer(config, ALGORITHM, model_dir, store=store)
    rows, results = batch(trainer.layout.data_ranks), {}
    results["gradient"], _ = gradient(trainer, rows)
    results["metrics"] = [trainer.update(rows) for _ in range(2)]
    results["after"] = trainer.full_tensors()
    results["reference"] = trainer.logprobs(rows, reference=True)
    results["published"] = published(trainer, torch.float32)
    trainer.refresh_reference()
    results["refreshed"], results["logprobs"] = trainer.logprobs(rows, reference=True), trainer.logprobs(rows)
    trainer.save(out / mode)
    assert trainer.saved()
    trainer.update(rows)
    results["next"] = trainer.full_tensors()
    if (other := out / "eager").is_dir() and mode == "graph":
        trainer.load(other)
        results["loaded"] = trainer.full_tensors()
        trainer.update(rows)
        results["next of other"] = trainer.full_tensors()
    trainer.close()
    return results


def main(model_dir: str, optimizer: str, out: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    results = {
        mode: exercise(mode, Path(model_dir), optimizer, Path(out), dist.PrefixStore(mode, store))
        for mode in ("eager", "graph")
    }
    torch.save(results, Path(out) / f"rank-{rank}.pt")
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*sys.argv[1:])
