"""Properties of packing on random samples."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_policy import make_samples

from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.packing import best_fit_decreasing, pack, padding_share, rank_rows, rows_per_microbatch
from rl_tpu.types import IGNORE_INDEX, PackedBatch, Sample


def unpack(batch: PackedBatch) -> list[tuple]:
    """Every packed sample as (ids, loss mask, log-probabilities, advantages) of its predicted tokens."""
    found = []
    for row in range(batch.rows):
        for segment in range(1, int(batch.segment_ids[row].max()) + 1):
            at = (batch.segment_ids[row] == segment).nonzero().flatten()
            assert (at.diff() == 1).all(), "a sample lies in one piece"
            assert batch.positions[row, at].tolist() == list(range(len(at)))
            ids = batch.input_ids[row, at].tolist()
            assert batch.labels[row, at].tolist() == [*ids[1:], IGNORE_INDEX], "no label crosses a boundary"
            columns = (batch.loss_mask, batch.sampler_logprobs, batch.advantages)
            assert all(column[row, at[-1]] == 0 for column in columns)
            found.append((ids, *(column[row, at[:-1]].tolist() for column in columns)))
    return found


def as_packed(sample: Sample) -> tuple:
    before = [0.0] * (len(sample.prompt_ids) - 1)
    mask = list(map(float, sample.loss_mask))
    logprobs = [torch.tensor(p).item() * m for p, m in zip(sample.logprobs, mask, strict=True)]
    advantages = [torch.tensor(sample.advantage).item() * m for m in mask]
    return (sample.prompt_ids + sample.response_ids, before + mask, before + logprobs, before + advantages)


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_packed_once_and_whole(seed):
    draw = random.Random(seed)
    ranks, microbatch_tokens = draw.choice([1, 2, 3]), draw.choice([None, 100, 300])
    samples = make_samples(draw.randint(1, 40), seed)
    row_tokens = sorted(draw.sample([60, 64, 100, 128, 256], draw.randint(1, 3)))
    batch = pack(samples, row_tokens, ranks, microbatch_tokens)
    assert batch.row_tokens in row_tokens
    assert batch.rows % (ranks * rows_per_microbatch(batch.row_tokens, microbatch_tokens)) == 0
    assert sorted(map(str, unpack(batch))) == sorted(map(str, map(as_packed, samples)))
    padding = batch.segment_ids == 0
    for tensor in (batch.input_ids, batch.loss_mask, batch.sampler_logprobs, batch.advantages):
        assert (tensor[padding] == 0).all()
    assert (batch.labels[padding] == IGNORE_INDEX).all()
    real = sum(sample.total_tokens for sample in samples)
    assert padding_share(batch) == pytest.approx(1 - real / (batch.rows * batch.row_tokens), abs=1e-6)
    again = pack(samples, row_tokens, ranks, microbatch_tokens)
    assert all(torch.equal(a, b) for a, b in zip(batch.tensors().values(), again.tensors().values(), strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_ranks_share_rows_and_tokens_evenly(seed):
    ranks = 2 + seed % 3
    batch = pack(make_samples(60, seed), [128], ranks)
    tokens = [int((batch.select(rank_rows(batch, rank, ranks)).segment_ids > 0).sum()) for rank in range(ranks)]
    assert sum(tokens) == int((batch.segment_ids > 0).sum())
    assert max(tokens) - min(tokens) <= 128


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_decreasing_is_near_the_fewest_rows(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 128) for _ in range(200)]
    rows = best_fit_decreasing(lengths, 128)
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 128) + 1


def sample_of(prompt: int, response: int) -> Sample:
    return Sample([1] * prompt, [2] * response, [1] * response, [-1.0] * response, [], "stop")


def test_the_length_that_wastes_least_is_chosen_and_the_shorter_of_two_equals():
    assert pack([sample_of(10, 20)] * 8, [32, 64, 256]).row_tokens == 32
    assert pack([sample_of(20, 20)] * 6, [64, 128]).row_tokens == 128
    assert pack([sample_of(32, 32)] * 8, [64, 128]).row_tokens == 64
    assert pack([sample_of(30, 3)] * 2, [32, 64]).row_tokens == 64


def test_an_exact_fit_has_no_padding():
    batch = pack([sample_of(32, 32)] * 4, [128])
    assert batch.rows == 2
    assert padding_share(batch) == 0


def test_bad_samples_are_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"sample of 70 tokens does not fit the longest row of 64"):
        pack([sample_of(30, 40)], [32, 64])
    with pytest.raises(RunError, match="no sample"):
        pack([], [64])
    broken = sample_of(3, 4)
    broken.logprobs.pop()
    with pytest.raises(RunError, match="4 response ids, 4 mask values and 3 logprobs"):
        pack([broken], [64])
    with pytest.raises(RunError, match="no prompt"):
        pack([sample_of(0, 4)], [64])
