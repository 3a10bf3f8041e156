"""What every rank does in test_cut_invariance.py: `python gradients_program.py MODEL_DIR OUT.pt SETTINGS [SETTINGS ...]`.

SETTINGS are JSON: settings of the trainer, and `cuts`, the numbers of micro-batches. OUT.pt holds, by SETTINGS and by case,
the gradient of one and the same batch in Hugging Face's names and the metrics of its update.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import make_samples, trainer_config

from rl_tpu.config.schema import AlgorithmConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch, Sample

ROW_TOKENS = 80
SAMPLES, GROUP = 16, 4
CUTS = (1, 2, 8)
LAYINGS = ("unpacked", "packed", "shared prompts")
ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.3, aggregation="token_mean")


def uneven_samples() -> list[Sample]:
    """Groups of samples with one prompt and answers of 1 to 40 tokens, the longest groups first: ranks that divide them in
    this order get unequal shares."""
    samples = make_samples(SAMPLES, seed=4)
    for start in range(0, SAMPLES, GROUP):
        for sample in samples[start : start + GROUP]:
            sample.prompt_ids = samples[start].prompt_ids
            # About what the tiny policy gives its tokens: ratios lie on both sides of either clip.
            sample.logprobs = [logprob / 2 - 3 for logprob in sample.logprobs]
    groups = [samples[start : start + GROUP] for start in range(0, SAMPLES, GROUP)]
    groups.sort(key=lambda group: -sum(sample.total_tokens for sample in group))
    return [sample for group in groups for sample in group]


def lay(name: str, ranks: int) -> PackedBatch:
    """All samples in rows: one in each, or packed for eight micro-batches on every rank."""
    samples = uneven_samples()
    if name != "unpacked":
        return pack(samples, [ROW_TOKENS], ranks, 8 * ROW_TOKENS, share_prompts=name == "shared prompts")
    rows = [pack([sample], [ROW_TOKENS]).tensors() for sample in samples]
    for index, row in enumerate(rows):
        row["sample_ids"] = row["sample_ids"].clamp(max=1) * (index + 1)
    return PackedBatch(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})


def gradient(trainer: PolicyTrainer, batch: PackedBatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient that an update on `batch` would follow, and the metrics of that update; the policy stays as it is."""
    step, parameters, found = trainer.optimizer.step, list(trainer.policy.model.parameters()), {}

    @torch.no_grad()
    def look(*arguments: bool) -> dict[str, float]:
        kept = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        found.update(trainer.full_tensors())
        metrics = step(*arguments)
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
        return metrics

    trainer.optimizer.step = look
    metrics = trainer.update(batch)
    trainer.optimizer.step = step
    return found, metrics


def exercise(model_dir: Path, settings: dict, store: dist.Store | None = None) -> dict[tuple[str, int], tuple]:
    """`gradient` by laying and number of micro-batches."""
    settings = {"row_tokens": [ROW_TOKENS]} | settings
    cuts = settings.pop("cuts", CUTS)
    config = trainer_config(**settings)
    trainer = PolicyTrainer(config, ALGORITHM, model_dir, store=store)
    results = {}
    for name in LAYINGS:
        batch = lay(name, trainer.layout.data_ranks)
        rows = batch.rows // trainer.layout.data_ranks
        for cut in cuts:
            assert rows % cut == 0
            trainer.config = config.model_copy(update={"microbatch_tokens": rows // cut * ROW_TOKENS})
            results[name, cut] = gradient(trainer, batch)
    trainer.close()
    return results


def main(model_dir: str, out: str, *settings: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    results = {each: exercise(Path(model_dir), json.loads(each), dist.PrefixStore(each, store)) for each in settings}
    if rank == 0:
        torch.save(results, out)
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*sys.argv[1:])
