"""Samples of unequal length laid side by side in rows of equal length.

An XLA device compiles one program per shape, so a row has one of a few fixed lengths and every rank runs the same number
of equal micro-batches. Segment ids and positions are made here, on the host.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from rl_tpu.errors import RunError, UserError
from rl_tpu.types import IGNORE_INDEX, PackedBatch, Sample


def pack(
    samples: Sequence[Sample], row_tokens: Sequence[int], ranks: int = 1, microbatch_tokens: int | None = None
) -> PackedBatch:
    """Pack `samples` (each with its advantage set) into rows of the length in `row_tokens` that wastes the least.

    The batch has R rows, R a multiple of ranks x `rows_per_microbatch`; rows without a sample fill up the last ones. Rank r
    owns the rows r * R / ranks up to (r + 1) * R / ranks (`rank_rows`), and the ranks' shares hold about equally many
    tokens. The result depends on the arguments alone.

    Raises UserError where a sample is longer than every allowed row.
    """
    if not samples:
        raise RunError("trainer: there is no sample to pack")
    lengths = [sample.total_tokens for sample in samples]
    if max(lengths) > max(row_tokens):
        raise UserError(
            f"trainer.row_tokens: a sample of {max(lengths)} tokens does not fit the longest row of {max(row_tokens)}; "
            "allow longer rows, or shorten data.max_prompt_tokens or rollout.max_response_tokens"
        )
    for sample in samples:
        _check(sample)
    candidates = [
        (_round_up(len(rows), ranks * rows_per_microbatch(length, microbatch_tokens)) * length, length, rows)
        for length in sorted(row_tokens)
        if length >= max(lengths)
        for rows in [best_fit_decreasing(lengths, length)]
    ]
    positions, length, rows = min(candidates, key=lambda candidate: candidate[:2])
    rows += [[] for _ in range(positions // length - len(rows))]
    return _fill(samples, _balance(rows, lengths, ranks), length)


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


def padding_share(batch: PackedBatch) -> float:
    """Share of the batch's positions that hold no sample, between 0 and 1."""
    return float((batch.segment_ids == 0).float().mean())


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` grouped so that no group's sum exceeds `capacity`: the longest first, each into the group
    with the least space that still fits it. At most 11/9 of the fewest possible groups, plus one (Johnson, 1974)."""
    groups: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, group), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(spaces, (lengths[index], -1))
        if at == len(spaces):
            space, group = capacity, len(groups)
            groups.append([])
        else:
            space, group = spaces.pop(at)
        groups[group].append(index)
        insort(spaces, (space - lengths[index], group))
    return groups


def _balance(rows: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """The rows reordered so that each rank's contiguous share has about the same number of tokens: fullest first, dealt
    out to the ranks forwards and backwards in turn."""
    order = sorted(range(len(rows)), key=lambda row: (-sum(lengths[i] for i in rows[row]), row))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for place, row in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[ranks - 1 - seat if turn % 2 else seat].append(rows[row])
    return [row for share in shares for row in share]


def _fill(samples: Sequence[Sample], rows: list[list[int]], length: int) -> PackedBatch:
    shape = (len(rows), length)
    input_ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    segment_ids = np.zeros(shape, np.int64)
    prefix_ids = np.zeros(shape, np.int64)
    sample_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    loss_mask = np.zeros(shape, np.float32)
    sampler_logprobs = np.zeros(shape, np.float32)
    advantages = np.zeros(shape, np.float32)
    count = np.arange(length)
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices, 1):
            sample = samples[index]
            ids = sample.prompt_ids + sample.response_ids
            end = start + len(ids)
            # Position t predicts token t + 1, so what belongs to response token k stands one before it.
            predicts = slice(start + len(sample.prompt_ids) - 1, end - 1)
            mask = np.asarray(sample.loss_mask, np.float32)
            input_ids[row, start:end] = ids
            positions[row, start:end] = count[: len(ids)]
            segment_ids[row, start:end] = segment
            sample_ids[row, start:end] = index + 1
            labels[row, start : end - 1] = ids[1:]
            loss_mask[row, predicts] = mask
            sampler_logprobs[row, predicts] = np.asarray(sample.logprobs, np.float32) * mask
            advantages[row, predicts] = sample.advantage * mask
            start = end
        positions[row, start:] = count[: length - start]
    return PackedBatch(
        *map(torch.from_numpy, (input_ids, positions, segment_ids, prefix_ids, sample_ids, labels, loss_mask)),
        sampler_logprobs=torch.from_numpy(sampler_logprobs),
        old_logprobs=torch.from_numpy(sampler_logprobs.copy()),
        advantages=torch.from_numpy(advantages),
    )


def _check(sample: Sample) -> None:
    counts = len(sample.response_ids), len(sample.loss_mask), len(sample.logprobs)
    if len(set(counts)) > 1:
        raise RunError("trainer: a sample has {} response ids, {} mask values and {} logprobs".format(*counts))
    if not sample.prompt_ids:
        raise RunError("trainer: a sample has no prompt; its first token would have nothing to be predicted from")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
