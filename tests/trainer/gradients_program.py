"""What every rank does in test_cut_invariance.py: `python gradients_program.py MODEL_DIR OUT.pt LAYOUT [LAYOUT ...]`.

A layout is JSON: settings of the trainer. OUT.pt holds, by layout and by case, the gradient of one and the same batch in
Hugging Face's names and its norm.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import make_samples, trainer_config

from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch, Sample

ROW_TOKENS = 64
SAMPLES = 16
CUTS = (1, 2, 8)
ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.3, aggregation="token_mean")


def uneven_samples() -> list[Sample]:
    """Samples of 2 to 60 tokens, the longest first: ranks that split them in this order get unequal shares."""
    samples = make_samples(SAMPLES, seed=4)
    for sample in samples:  # what the tiny policy gives its tokens: ratios lie on both sides of the clip
        sample.logprobs = [logprob / 2 - 3 for logprob in sample.logprobs]
    return sorted(samples, key=lambda sample: -sample.total_tokens)


def packed(ranks: int) -> PackedBatch:
    """Several samples to a row, at least eight rows for every rank."""
    return pack(uneven_samples(), [ROW_TOKENS], ranks, 8 * ROW_TOKENS)


def unpacked(ranks: int) -> PackedBatch:
    """One sample to a row, in the order of their length."""
    rows = [pack([sample], [ROW_TOKENS]) for sample in uneven_samples()]
    for index, row in enumerate(rows):
        row.sample_ids[row.sample_ids > 0] = index + 1
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(PackedBatch)}
    return PackedBatch(**{name: None if rows[0] is None else torch.cat(rows) for name, rows in columns.items()})


LAYINGS: dict[str, Callable[[int], PackedBatch]] = {"packed": packed, "unpacked": unpacked}


def gradient(trainer: PolicyTrainer, batch: PackedBatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient that an update of `batch` would follow, and the update's metrics; the policy stays as it is."""
    step, parameters, seen = trainer.optimizer.step, list(trainer.policy.model.parameters()), {}

    @torch.no_grad()
    def look(*args: bool) -> dict[str, float]:
        kept = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        seen.update(trainer.full_tensors())
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
        for group in trainer.optimizer.optimizer.optimizers[0].param_groups:
            group["lr"] = 0.0
        return step(*args)

    trainer.optimizer.step = look
    metrics = trainer.update(batch)
    trainer.optimizer.step = step
    return seen, metrics


def exercise(model_dir: Path, settings: dict, store: dist.Store | None = None) -> dict[str, dict]:
    """Results by `LAYING, N micro-batches`, and the policy as it was read under `loaded`."""
    cuts = settings.pop("cuts", CUTS)
    config = trainer_config(**{"row_tokens": [ROW_TOKENS]} | settings)
    trainer = PolicyTrainer(config, ALGORITHM, model_dir, store=store)
    results = {"loaded": trainer.full_tensors()}
    for name, lay in LAYINGS.items():
        batch = lay(trainer.layout.data_ranks)
        rows = batch.rows // trainer.layout.data_ranks
        for cut in cuts:
            trainer.config = config.model_copy(update={"microbatch_tokens": rows // cut * ROW_TOKENS})
            assert rows % cut == 0
            whole, metrics = gradient(trainer, batch)
            results[f"{name}, {cut} micro-batches"] = {"gradient": whole, "metrics": metrics}
    trainer.close()
    return results


def main(model_dir: str, out: str, *layouts: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    results = {
        layout: exercise(Path(model_dir), json.loads(layout), dist.PrefixStore(layout, store)) for layout in layouts
    }
    if rank == 0:
        torch.save(results, out)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*sys.argv[1:])
