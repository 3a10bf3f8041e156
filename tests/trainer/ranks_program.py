"""What every rank does in test_ranks.py: `python ranks_program.py BATCH.pt MODEL_DIR OUT_DIR [MODEL_DIR OUT_DIR ...]`."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import trainer_config

from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch
from weight_sync import open_receiver, open_sender


def published(trainer: PolicyTrainer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The policy as an engine receives it through shared memory (on rank 0)."""
    run_id = [uuid.uuid4().hex[:8]]
    dist.broadcast_object_list(run_id)
    sender = open_sender(
        "shared_memory", run_id=run_id[0], rank=trainer.rank, world_size=trainer.ranks, group=dist.group.WORLD
    )
    handle = sender.publish(0, trainer.shards(dtype))
    tensors = {}
    if trainer.rank == 0:
        with open_receiver("shared_memory").receive(handle) as received:
            tensors = {name: tensor.clone() for name, tensor in received.tensors.items()}
    dist.barrier()
    sender.close()
    return tensors


def exercise(batch_file: Path, model_dir: Path, out: Path, store: dist.Store | None = None) -> None:
    """Update, publish, save, load and export; everything seen on the way goes to OUT_DIR/rank-N.pt."""
    batch = PackedBatch(**torch.load(batch_file))
    algorithm = AlgorithmConfig(aggregation="sample_mean")
    trainer = PolicyTrainer(trainer_config(), algorithm, model_dir, seed=3, store=store)
    results = {"logprobs": trainer.logprobs(batch)}
    results["published"] = published(trainer, torch.bfloat16)
    results["loaded"] = trainer.full_tensors()
    trainer.save(out / "start")
    results["metrics"] = trainer.update(batch)
    results["after_one"] = trainer.full_tensors()
    trainer.save(out / "one")
    trainer.export_hf(out / "hf")
    drawn = torch.rand(3)
    results["second_metrics"] = trainer.update(batch)
    results["after_two"] = trainer.full_tensors()

    trainer.load(out / "one")
    results["restored"] = trainer.full_tensors()
    results["random_state_restored"] = torch.equal(torch.rand(3), drawn)
    results["metrics_again"] = trainer.update(batch)
    results["after_two_again"] = trainer.full_tensors()

    trainer.load(out / "start")
    results["metrics_from_start"] = trainer.update(batch)
    results["after_one_again"] = trainer.full_tensors()
    if (other := out / "other").is_dir():  # a checkpoint that another number of ranks wrote
        trainer.load(other)
        results["from_other"] = trainer.full_tensors()
        results["from_other_metrics"] = trainer.update(batch)
    torch.save(results, out / f"rank-{trainer.rank}.pt")
    trainer.close()


def main(batch_file: Path, *directories: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    for model_dir, out in zip(directories[::2], directories[1::2], strict=True):
        exercise(batch_file, model_dir, out, dist.PrefixStore(model_dir.name, store))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
