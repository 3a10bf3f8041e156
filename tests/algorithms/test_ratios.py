"""Ratios against sums over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
import twins
from batches import agree, random_batch, rows_of

from rl_tpu.algorithms.masked import usable_tokens
from rl_tpu.algorithms.ratios import MAX_LOG_RATIO, log_ratio


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(5))
def test_values_and_gradient(level, seed):
    batch = random_batch(seed)
    rows = rows_of(batch, seed)
    logprobs, old = rows.tensor(batch.logprobs).requires_grad_(), rows.tensor(batch.old)
    found = log_ratio(logprobs, old, rows.tensor(batch.masks, 0), rows.segment_ids, level)
    agree(rows.samples(found), twins.log_ratios(batch.logprobs, batch.old, batch.masks, level))

    weights = [[math.sin(7 * s + t) for t in range(len(own))] for s, own in enumerate(batch.masks)]
    (found * rows.tensor(weights, 0)).sum().backward()

    def weighted(values):
        ratios = twins.log_ratios(values, batch.old, batch.masks, level)
        return sum(w * r for own, ws in zip(ratios, weights, strict=True) for w, r in zip(ws, own, strict=True))

    agree(rows.samples(logprobs.grad), twins.gradient(weighted, batch.logprobs))
    agree(rows.samples(logprobs.grad), twins.finite_differences(weighted, batch.logprobs), abs=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("gap", [1e3, 1e30, -1e3, -1e30])
def test_a_ratio_that_would_overflow_is_held_and_has_no_gradient(level, gap):
    logprobs = torch.tensor([[gap, gap]], dtype=torch.float64, requires_grad=True)
    found = log_ratio(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int64), level)
    assert found.tolist() == [[math.copysign(MAX_LOG_RATIO, gap)] * 2]
    found.exp().sum().backward()
    assert logprobs.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_no_numbers_are_dropped_from_the_mask_and_leave_the_others_alone(level, bad):
    batch = random_batch(3)
    broken = [own[:] for own in batch.logprobs]
    at = next((s, t) for s, mask in enumerate(batch.masks) for t, inside in enumerate(mask) if inside and sum(mask) > 1)
    broken[at[0]][at[1]] = bad
    rows = rows_of(batch)
    logprobs, old, mask = rows.tensor(broken).requires_grad_(), rows.tensor(batch.old), rows.tensor(batch.masks, 0)
    usable = usable_tokens(mask, logprobs, old)
    assert usable.dtype == torch.float32
    assert float((mask - usable).sum()) == 1
    kept = twins.usable(batch.masks, broken)
    assert rows.samples(usable) == kept
    found = log_ratio(logprobs, old, usable, rows.segment_ids, level)
    agree(rows.samples(found), twins.log_ratios(broken, batch.old, kept, level))
    found.sum().backward()
    assert logprobs.grad.isfinite().all()
    assert usable_tokens(mask, old, logprobs).equal(usable), "in any place"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_under_the_mask_is_all_zero(level):
    nothing = torch.full((2, 5), math.nan, requires_grad=True)
    found = log_ratio(nothing, nothing, torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64), level)
    found.sum().backward()
    assert (found == 0).all()
    assert (nothing.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_anything_is_subtracted(dtype):
    logprobs, old = torch.tensor([[-1.01, -7.3]]).to(dtype), torch.tensor([[-1.0, -7.0]]).to(dtype)
    found = log_ratio(logprobs, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int64), "token")
    assert found.dtype == torch.float32
    assert found.tolist() == (logprobs.float() - old.float()).tolist()


def test_the_whole_length_of_a_row_can_be_segments_of_one_token():
    segment_ids = torch.arange(1, 6).unsqueeze(0)
    logprobs = torch.linspace(-1, 1, 5).unsqueeze(0)
    found = log_ratio(logprobs, torch.zeros(1, 5), torch.ones(1, 5), segment_ids, "sequence")
    torch.testing.assert_close(found, logprobs)


def test_compiles_whole_with_one_shape_for_all_data():
    """XLA compiles once per shape: no size may depend on what the rows hold."""
    compiled = torch.compile(log_ratio, backend="eager", fullgraph=True, dynamic=False)
    with torch.compiler.set_stance("default"):
        for seed in range(3):
            batch = random_batch(seed)
            rows = rows_of(batch, seed)
            given = (rows.tensor(batch.logprobs)[:1], rows.tensor(batch.old)[:1], rows.tensor(batch.masks, 0)[:1])
            expected = log_ratio(*given, rows.segment_ids[:1], "sequence")
            torch.testing.assert_close(compiled(*given, rows.segment_ids[:1], "sequence"), expected)
            torch.compiler.set_stance("fail_on_recompile")


def test_the_policy_that_the_ratio_compares_with_gets_no_gradient():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    for level in ("token", "sequence"):
        found = log_ratio(logprobs, logprobs, torch.ones(1, 2), torch.tensor([[1, 2]]), level)
        assert found.tolist() == [[0, 0]]
        assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == [[1, 1]]
