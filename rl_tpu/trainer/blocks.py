"""Blocks: what lies in one piece in a row. A sample, or samples of one prompt whose common tokens are there once."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_tpu.trainer.bins import best_fit_decreasing
from rl_tpu.types import Sample

CUT_CANDIDATES = 16
"""Blocks that are tried when the last space of a row is to be filled with a part of one."""


@dataclass(frozen=True)
class Block:
    """Samples (their indices) that share their first `shared` tokens; each has `own` tokens after those.

    Shared is the prompt without its last token: that one predicts the answer's first, so every answer begins with it.
    A block of one sample has as many tokens as the sample. The sample with most tokens comes first. Blocks of one
    `prompt` may be joined.
    """

    prompt: int
    samples: tuple[int, ...]
    shared: int
    own: tuple[int, ...]

    @cached_property
    def tokens(self) -> int:
        return self.shared + sum(self.own)

    @property
    def pairs(self) -> int:
        """Pairs of tokens of which the later attends to the earlier, or to itself."""
        triangle = self.shared * (self.shared + 1) // 2
        return triangle + sum(own * self.shared + own * (own + 1) // 2 for own in self.own)

    def part(self, places: Iterable[int]) -> Block:
        """The block of the samples at these places of this one."""
        samples, own = zip(*((self.samples[i], self.own[i]) for i in places), strict=True)
        return Block(self.prompt, samples, self.shared, own)

    def parts(self, capacity: int) -> list[Block]:
        """This block, or as few as are found of at most `capacity` tokens each."""
        if self.tokens <= capacity:
            return [self]
        return [self.part(places) for places in best_fit_decreasing(self.own, capacity - self.shared)]

    def filling(self, space: int) -> list[int]:
        """Places of samples that together with the shared tokens fit `space`: the longest first, whichever still fits."""
        places, left = [], space - self.shared
        for place, own in enumerate(self.own):
            if own <= left:
                places.append(place)
                left -= own
        return places


def sample_blocks(samples: Sequence[Sample]) -> list[Block]:
    """A block for each sample."""
    return [
        Block(index, (index,), len(sample.prompt_ids) - 1, (len(sample.response_ids) + 1,))
        for index, sample in enumerate(samples)
    ]


def prompt_blocks(samples: Sequence[Sample]) -> list[Block]:
    """A block for each run of samples with the same prompt of at least two tokens, one for each other sample."""
    blocks: list[Block] = []
    for index, block in enumerate(sample_blocks(samples)):
        if blocks and block.shared and samples[index].prompt_ids == samples[index - 1].prompt_ids:
            block = _join(blocks.pop(), block)
        blocks.append(block)
    return [block.part(sorted(range(len(block.own)), key=lambda i: -block.own[i])) for block in blocks]


def joined(row: Sequence[Block]) -> list[Block]:
    """The row with one block for each prompt."""
    blocks: dict[int, Block] = {}
    for block in row:
        other = blocks.get(block.prompt)
        blocks[block.prompt] = _join(other, block) if other else block
    return list(blocks.values())


def whole_rows(blocks: Sequence[Block], capacity: int) -> list[list[Block]]:
    """Rows of at most `capacity` tokens in which every block is whole, unless it is longer than a row."""
    parts = [part for block in blocks for part in block.parts(capacity)]
    return [[parts[i] for i in row] for row in best_fit_decreasing([part.tokens for part in parts], capacity)]


def filled_rows(blocks: Sequence[Block], capacity: int) -> list[list[Block]]:
    """Rows of at most `capacity` tokens, one filled after the other: with the longest block that fits, and where none
    does with a part of one. A block that is cut has its shared tokens twice, but rows are left less empty."""
    waiting = sorted(blocks, key=_tokens)
    rows = []
    while waiting:
        row, space = [], capacity
        while block := _take(waiting, space):
            row.append(block)
            space -= block.tokens
        rows.append(row)
    return rows


def separate_rows(blocks: Sequence[Block], capacity: int) -> list[list[Block]]:
    """Rows of at most `capacity` tokens into which the samples went one by one: only those share that met in a row."""
    samples = [block.part([place]) for block in blocks for place in range(len(block.own))]
    return [joined(row) for row in whole_rows(samples, capacity)]


def _take(waiting: list[Block], space: int) -> Block | None:
    """Take the longest block that fits `space`, or else the longest part, out of `waiting` (ascending in tokens)."""
    if at := bisect_right(waiting, space, key=_tokens):
        return waiting.pop(at - 1)
    parts = [(block, block.filling(space)) for block in waiting[:CUT_CANDIDATES]]
    block, places = max(parts, key=lambda part: sum(part[0].own[i] for i in part[1]), default=(None, []))
    if not places:
        return None
    waiting.remove(block)
    insort(waiting, block.part(i for i in range(len(block.own)) if i not in places), key=_tokens)
    return block.part(places)


def _join(first: Block, second: Block) -> Block:
    return Block(first.prompt, first.samples + second.samples, first.shared, first.own + second.own)


def _tokens(block: Block) -> int:
    return block.tokens
