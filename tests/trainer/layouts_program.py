"""What every rank does in test_layouts.py: `python layouts_program.py BATCH.pt MODEL_DIR CHECKPOINT OUT_DIR SETTINGS ...`.

Layout after layout loads the checkpoint of the one before it (the first one CHECKPOINT), publishes, learns once and saves.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks_program import published
from tiny_policy import trainer_config

from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch


def visit(
    batch: PackedBatch, model_dir: Path, checkpoint: Path | None, saved: Path, settings: dict, store: dist.Store | None
) -> dict:
    """What the layout of `settings` loads from `checkpoint` and makes of it, which lies in `saved` then."""
    trainer = PolicyTrainer(trainer_config(**settings), AlgorithmConfig(), model_dir, store=store)
    if checkpoint is not None:
        trainer.load(checkpoint)
    results = {"loaded": trainer.full_tensors(), "published": published(trainer, torch.bfloat16)}
    results["metrics"] = trainer.update(batch)
    results["after"] = trainer.full_tensors()
    trainer.save(saved)
    trainer.saved()
    trainer.close()
    return results


def main(batch_file: str, model_dir: str, checkpoint: str, out: str, *layouts: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    batch = PackedBatch(**torch.load(batch_file))
    results, last = [], Path(checkpoint)
    for number, settings in enumerate(layouts):
        place = Path(out) / f"checkpoint-{number}"
        meeting = dist.PrefixStore(str(number), store)
        results.append(visit(batch, Path(model_dir), last, place, json.loads(settings), meeting))
        last = place
    if rank == 0:
        torch.save(results, Path(out) / "results.pt")
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*sys.argv[1:])
