"""Random samples, and packed rows that hold them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Batch:
    """What every token of every sample says, as lists of lists [sample][token]; a sample may be empty."""

    masks: list[list[int]]
    logprobs: list[list[float]]
    old: list[list[float]]
    advantages: list[list[float]] = field(default_factory=list)


def random_batch(seed: int, samples: int = 7, longest: int = 9, apart: float = 0.5) -> Batch:
    """Samples of uneven length with holes in their masks; one is empty and one all masked. Ratios are about
    exp(+-apart)."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, longest) for _ in range(samples)]
    lengths[1 % samples] = 0
    masks = [[int(draw.random() < 0.8) for _ in range(length)] for length in lengths]
    masks[2 % samples] = [0] * lengths[2 % samples]
    old = [[-3 * draw.random() - 0.01 for _ in range(length)] for length in lengths]
    logprobs = [[value + draw.gauss(0, apart) for value in own] for own in old]
    advantages = [[draw.gauss(0, 1)] * length for length in lengths]
    return Batch(masks, logprobs, old, advantages)


class Rows:
    """Samples laid side by side in rows, each after a prompt that is under no mask, with padding at the end of a row.

    Positions that belong to no sample's token hold `GARBAGE` unless a tensor asks for something else.
    """

    GARBAGE = math.nan

    def __init__(self, lengths: list[int], row_tokens: int = 24, seed: int = 0):
        draw = random.Random(seed)
        order = list(range(len(lengths)))
        draw.shuffle(order)
        self.row_tokens, self.lengths, self.places = row_tokens, lengths, {}
        row = start = 0
        segments: list[list[tuple[int, int, int]]] = [[]]
        for sample in order:
            prompt = draw.randint(1, 3)
            if start + prompt + lengths[sample] > row_tokens:
                row, start = row + 1, 0
                segments.append([])
            self.places[sample] = (row, start + prompt)
            segments[row].append((sample, start, start + prompt + lengths[sample]))
            start += prompt + lengths[sample]
        self.rows = row + 1
        self.segment_ids = torch.zeros(self.rows, row_tokens, dtype=torch.int64)
        self.sample_ids = torch.zeros(self.rows, row_tokens, dtype=torch.int64)
        for at, own in enumerate(segments):
            for number, (sample, begin, end) in enumerate(own, 1):
                self.segment_ids[at, begin:end] = number
                self.sample_ids[at, begin:end] = sample + 1

    def tensor(self, values: list[list[float]], elsewhere: float = GARBAGE, dtype=torch.float64) -> torch.Tensor:
        packed = torch.full((self.rows, self.row_tokens), elsewhere, dtype=dtype)
        for sample, (row, start) in self.places.items():
            for t in range(self.lengths[sample]):
                packed[row, start + t] = values[sample][t]
        return packed

    def samples(self, packed: torch.Tensor) -> list[list[float]]:
        """Back to lists; whatever belongs to no sample's token must be 0."""
        assert packed.shape == self.segment_ids.shape
        packed = packed.detach()
        rest, found = packed.clone(), []
        for sample in range(len(self.lengths)):
            row, start = self.places[sample]
            found.append([float(packed[row, start + t]) for t in range(self.lengths[sample])])
            rest[row, start : start + self.lengths[sample]] = 0
        assert (rest == 0).all()
        return found


def rows_of(batch: Batch, seed: int = 0) -> Rows:
    return Rows([len(mask) for mask in batch.masks], seed=seed)


def agree(found: list[list[float]], expected: list[list[float]], rel: float = 1e-9, abs: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for sample, (own, twin) in enumerate(zip(found, expected, strict=True)):
        assert own == pytest.approx([float(value) for value in twin], rel=rel, abs=abs), f"sample {sample}"
