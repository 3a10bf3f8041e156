"""Blocks written into rows: the tensors of a packed batch, filled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rl_tpu.trainer.blocks import Block
from rl_tpu.types import IGNORE_INDEX, PackedBatch, Sample


def write_rows(samples: Sequence[Sample], rows: Sequence[Sequence[Block]], row_tokens: int) -> PackedBatch:
    """The batch whose rows of `row_tokens` positions hold these blocks one after the other, then padding.

    A block of one sample is one segment. A block of several is a segment of their shared tokens, which no sample owns
    and in which nothing is predicted, and after it one segment per sample that names it as its prefix.
    """
    shape = (len(rows), row_tokens)
    batch = {
        name: np.zeros(shape, np.int64)
        for name in ("input_ids", "positions", "segment_ids", "prefix_ids", "sample_ids")
    }
    batch["labels"] = np.full(shape, IGNORE_INDEX, np.int64)
    batch |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "sampler_logprobs", "advantages")}
    for row, blocks in enumerate(rows):
        writer = _RowWriter({name: column[row] for name, column in batch.items()})
        for block in blocks:
            writer.write(samples, block)
        writer.pad()
    batch["old_logprobs"] = batch["sampler_logprobs"].copy()
    return PackedBatch(**{name: torch.from_numpy(column) for name, column in batch.items()})


class _RowWriter:
    def __init__(self, row: dict[str, np.ndarray]):
        self.row = row
        self.count = np.arange(len(row["input_ids"]))
        self.end, self.segment = 0, 0

    def write(self, samples: Sequence[Sample], block: Block) -> None:
        prompt = np.asarray(samples[block.samples[0]].prompt_ids, np.int64)
        skipped = prefix = 0
        if len(block.samples) > 1:
            self._segment(prompt[:-1], 0, 0)
            skipped, prefix = len(prompt) - 1, self.segment
        for index in block.samples:
            sample = samples[index]
            response = np.asarray(sample.response_ids, np.int64)
            own = self._segment(np.concatenate([prompt[skipped:], response]), skipped, prefix)
            # Position t predicts token t + 1, so what belongs to response token k stands one before it.
            predicts = slice(own.stop - 1 - len(response), own.stop - 1)
            mask = np.asarray(sample.loss_mask, np.float32)
            self.row["sample_ids"][own] = index + 1
            self.row["labels"][own.start : own.stop - 1] = self.row["input_ids"][own.start + 1 : own.stop]
            self.row["loss_mask"][predicts] = mask
            self.row["sampler_logprobs"][predicts] = np.where(mask > 0, np.asarray(sample.logprobs, np.float32), 0)
            self.row["advantages"][predicts] = np.where(mask > 0, sample.advantage, 0)

    def _segment(self, ids: np.ndarray, first_position: int, prefix: int) -> slice:
        place = slice(self.end, self.end + len(ids))
        self.segment += 1
        self.row["input_ids"][place] = ids
        self.row["positions"][place] = self.count[first_position : first_position + len(ids)]
        self.row["segment_ids"][place] = self.segment
        self.row["prefix_ids"][place] = prefix
        self.end = place.stop
        return place

    def pad(self) -> None:
        self.row["positions"][self.end :] = self.count[: len(self.count) - self.end]
