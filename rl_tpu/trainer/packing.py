"""Samples of unequal length laid side by side in rows of equal length.

An XLA device compiles one program per shape, so a row has one of a few fixed lengths and every rank runs the same number
of equal micro-batches. Segment ids and positions are made here, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.bins import deal
from rl_tpu.trainer.blocks import Block, filled_rows, prompt_blocks, sample_blocks, separate_rows, whole_rows
from rl_tpu.trainer.rows import write_rows
from rl_tpu.types import IGNORE_INDEX, PackedBatch, Sample

Rows = list[list[Block]]

HALVINGS = 5
"""Of the interval in which the emptiest rows are looked for that still suffice."""
PAIRS_PER_TOKEN = 8192
"""So many attended pairs cost about as much as one token's matrix products: 6 x the width of a usual dense model."""


def pack(
    samples: Sequence[Sample],
    row_tokens: Sequence[int],
    ranks: int = 1,
    microbatch_tokens: int | None = None,
    share_prompts: bool = False,
) -> PackedBatch:
    """Pack `samples` into R rows of that length in `row_tokens` which needs the fewest positions.

    R is a multiple of ranks x `rows_per_microbatch`, so every rank runs the same number of equal micro-batches. Lengths
    beyond `microbatch_tokens` are used only where a sample fits no other; of lengths that need equally many positions, the
    one with fewer micro-batches wins, then the longer. Rank r owns the rows r * R / ranks up to (r + 1) * R / ranks
    (`rank_rows`). Samples are put into rows, and rows dealt to ranks, so that the ranks wait for each other as little as
    possible, micro-batch by micro-batch; rows without a sample, if any, are a rank's last. The result depends on the
    arguments alone.

    With `share_prompts`, samples that follow one another and have the same prompt have its tokens but the last once in
    every row they are in. That never takes more positions, nor more tokens, than without.

    Raises UserError where a sample is longer than every allowed row.
    """
    if not samples:
        raise RunError("trainer: there is no sample to pack")
    longest = max(sample.total_tokens for sample in samples)
    if longest > max(row_tokens):
        raise UserError(
            f"trainer.row_tokens: a sample of {longest} tokens does not fit the longest row of {max(row_tokens)}; "
            "allow longer rows, or shorten data.max_prompt_tokens or rollout.max_response_tokens"
        )
    for sample in samples:
        _check(sample)
    blocks = prompt_blocks(samples) if share_prompts else sample_blocks(samples)
    ways = (whole_rows, filled_rows, separate_rows) if len(blocks) < len(samples) else (whole_rows,)
    shapes = []
    for length in _allowed(row_tokens, longest, microbatch_tokens):
        size = ranks * rows_per_microbatch(length, microbatch_tokens)
        microbatches = min(-(-len(way(blocks, length)) // size) for way in ways)
        shapes.append((length, microbatches, microbatches * size))
    length, microbatches, count = min(shapes, key=lambda shape: (shape[0] * shape[2], shape[1], -shape[0]))
    layouts = [
        _arranged(rows, count, ranks, microbatches)
        for way in ways
        for rows in _layouts(way, blocks, count, length, longest)
    ]
    _, rows = min(layouts, key=lambda layout: layout[0])
    return write_rows(samples, rows, length)


def rows_per_microbatch(row_tokens: int, microbatch_tokens: int | None) -> int:
    """Rows of `row_tokens` that one forward and backward of a rank holds: as many as `microbatch_tokens` allow (None:
    one), and at least one."""
    return max(1, (microbatch_tokens or 0) // row_tokens)


def rank_rows(batch: PackedBatch, rank: int, ranks: int) -> slice:
    """The rows of `batch`, packed for a multiple of `ranks` rows, that belong to `rank`."""
    share, rest = divmod(batch.rows, ranks)
    if rest:
        raise RunError(f"trainer: {batch.rows} rows were packed for another number of ranks than {ranks}")
    return slice(rank * share, (rank + 1) * share)


def spread(values: Sequence[float] | torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """One value per packed sample, [samples] -> at every token that the policy wrote the value of its sample, elsewhere
    0, [R, L] float32."""
    table = torch.as_tensor(values, dtype=torch.float32)
    return torch.where(batch.loss_mask > 0, table[(batch.sample_ids - 1).clamp(min=0)], 0.0)


def spread_over_turns(samples: Sequence[Sample], batch: PackedBatch) -> torch.Tensor:
    """At every token that the policy wrote the advantage of its turn, elsewhere 0, [R, L] float32; ``samples`` are those
    that were packed."""
    table: list[float] = [0.0]
    shifts = []
    for sample in samples:
        # Position t predicts token t + 1 of its sample, prompt included.
        shifts.append(len(table) + 1 - len(sample.prompt_ids))
        of_tokens = [0.0] * len(sample.response_ids)
        for turn in sample.turns:
            of_tokens[turn.start : turn.end] = [turn.advantage] * (turn.end - turn.start)
        table += of_tokens
    places = batch.positions + torch.tensor(shifts)[(batch.sample_ids - 1).clamp(min=0)]
    values = torch.tensor(table, dtype=torch.float32)[places.clamp(0, len(table) - 1)]
    return torch.where(batch.loss_mask > 0, values, 0.0)


def per_sample_sums(values: torch.Tensor, batch: PackedBatch, samples: int) -> torch.Tensor:
    """Sums of `values` [R, L] over the tokens that the policy wrote of each of so many packed samples, [samples]. What
    stands at other tokens does not matter, not even if it is infinite."""
    written = torch.where(batch.loss_mask > 0, values, 0.0)
    sums = written.new_zeros(samples + 1).index_add(0, batch.sample_ids.flatten(), written.flatten())
    return sums[1:]


def padding_share(batch: PackedBatch) -> float:
    """Share of the batch's positions that hold no token, between 0 and 1."""
    return float((batch.segment_ids == 0).float().mean())


def imbalance(batch: PackedBatch, ranks: int) -> float:
    """Tokens of the rank that has most, over the mean of the ranks: 1 where all have equally many."""
    tokens = (batch.segment_ids > 0).sum(1).reshape(ranks, -1).sum(1).double()
    return float(tokens.max() / tokens.mean())


def shared_share(batch: PackedBatch) -> float:
    """Share of the samples' tokens, each sample counted whole, that sharing prompts left out of the batch, 0 to 1."""
    last = (batch.sample_ids > 0) & (batch.labels == IGNORE_INDEX)
    return 1 - float((batch.segment_ids > 0).sum() / (batch.positions[last] + 1).sum())


def microbatch_shape(batch: PackedBatch, microbatch_tokens: int | None) -> tuple[int, int]:
    """(rows, tokens per row) of every micro-batch. A device with static shapes compiles once for each that a run sees."""
    return rows_per_microbatch(batch.row_tokens, microbatch_tokens), batch.row_tokens


def _allowed(row_tokens: Sequence[int], longest: int, microbatch_tokens: int | None) -> list[int]:
    """The lengths that hold the longest sample and keep to the budget of a micro-batch, or else the one least above."""
    enough = sorted(length for length in row_tokens if length >= longest)
    return [length for length in enough if microbatch_tokens is None or length <= microbatch_tokens] or enough[:1]


def _layouts(
    way: Callable[[Sequence[Block], int], Rows], blocks: Sequence[Block], count: int, length: int, longest: int
) -> Iterator[Rows]:
    """The blocks in at most `count` rows of `length`: rows as full as possible, then ever more evenly filled ones.

    As MULTIFIT does (Coffman, Garey, Johnson, 1978): halve the interval of the capacities that suffice.
    """
    low, high = max(longest, -(-sum(block.tokens for block in blocks) // count)), length
    capacity = length
    for _ in range(1 + HALVINGS):
        rows = way(blocks, capacity)
        if len(rows) <= count:
            yield rows
            high = capacity
        else:
            low = capacity + 1
        if low >= high:
            return
        capacity = (low + high) // 2


def _arranged(rows: Rows, count: int, ranks: int, microbatches: int) -> tuple[float, Rows]:
    """What a step costs, and `rows` and the empty ones up to `count` in the order of the ranks that own them.

    All ranks wait for the slowest in every micro-batch: the cost is the sum over these of the dearest rank's.
    """
    rows = rows + [[] for _ in range(count - len(rows))]
    costs = [sum(block.tokens + block.pairs / PAIRS_PER_TOKEN for block in row) for row in rows]
    hands = deal(costs, ranks)
    size = count // ranks // microbatches
    cost = sum(
        max(sum(costs[row] for row in hand[start : start + size]) for hand in hands)
        for start in range(0, count // ranks, size)
    )
    return cost, [rows[row] for hand in hands for row in hand]


def _check(sample: Sample) -> None:
    counts = len(sample.response_ids), len(sample.loss_mask), len(sample.logprobs)
    if len(set(counts)) > 1:
        raise RunError("trainer: a sample has {} response ids, {} mask values and {} logprobs".format(*counts))
    if not sample.prompt_ids:
        raise RunError("trainer: a sample has no prompt; its first token would have nothing to be predicted from")
