"""Weights against the means they are called after, and against any cut of the batch."""

from __future__ import annotations

import random

import pytest
import torch
import twins
from batches import Batch, agree, random_batch, rows_of

from rl_tpu.algorithms.aggregation import sample_sums, token_weights
from rl_tpu.algorithms.masked import masked

AGGREGATIONS = ["token_mean", "sample_mean", "constant_length"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(10))
def test_against_the_twin(aggregation, seed):
    batch = random_batch(seed, samples=random.Random(seed).randint(1, 12))
    rows = rows_of(batch, seed)
    found = token_weights(rows.tensor(batch.masks, 0), rows.sample_ids, aggregation, 9)
    assert found.dtype == torch.float32
    agree(rows.samples(found), twins.token_weights(batch.masks, aggregation, 9), rel=1e-6)


def values_of(batch: Batch) -> list[list[float]]:
    draw = random.Random(0)
    return [[draw.gauss(0, 1) for _ in own] for own in batch.masks]


@pytest.mark.parametrize("seed", range(5))
def test_weighted_sums_are_the_means(seed):
    batch = random_batch(seed)
    rows, values = rows_of(batch, seed), values_of(batch)
    mask, of_tokens = rows.tensor(batch.masks, 0), rows.tensor(values, 0)
    kept = [[v for v, inside in zip(own, m, strict=True) if inside] for own, m in zip(values, batch.masks, strict=True)]
    every, taught = [value for own in kept for value in own], [own for own in kept if own]
    expected = {
        "token_mean": twins.mean(every),
        "sample_mean": twins.mean([twins.mean(own) for own in taught]),
        "constant_length": sum(sum(own) / 9 for own in kept) / len(kept),
    }
    for aggregation, mean in expected.items():
        weights = token_weights(mask, rows.sample_ids, aggregation, 9)
        assert float((weights * of_tokens).sum()) == pytest.approx(mean, abs=1e-6)
        if aggregation != "constant_length":
            assert float(weights.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_the_gradient_does_not_depend_on_the_cut_into_ranks_and_microbatches(aggregation, parts):
    """Parts are uneven: by rows, and one of them without any token. A mean of the parts' own means would differ."""
    batch = random_batch(5, samples=24)
    rows, values = rows_of(batch), values_of(batch)
    mask = rows.tensor(batch.masks, 0)
    weights = token_weights(mask, rows.sample_ids, aggregation, 9).double()
    parameter = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def loss(of_rows) -> torch.Tensor:
        tokens = masked(rows.tensor(values)[of_rows], mask[of_rows])
        return (torch.sin(parameter * tokens) * weights[of_rows]).sum()

    cuts = [list(range(rows.rows))[part::parts] for part in range(parts)]
    cut = sum(torch.autograd.grad(loss(of_rows), parameter)[0] for of_rows in cuts if of_rows)
    torch.testing.assert_close(cut, torch.autograd.grad(loss(slice(None)), parameter)[0], rtol=1e-12, atol=1e-12)

    twin = twins.token_weights(batch.masks, aggregation, 9)

    def whole(at):
        pairs = [(v, w) for own, ws in zip(values, twin, strict=True) for v, w in zip(own, ws, strict=True)]
        return sum((at[0][0] * value).sin() * weight for value, weight in pairs)

    assert float(cut) == pytest.approx(twins.gradient(whole, [[0.3]])[0][0], rel=1e-6)


def test_ranks_with_uneven_tokens_are_where_means_of_means_go_wrong():
    """1 token against 3: each rank's own mean would weigh the lone token three times as much."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    weights = token_weights(mask, torch.tensor([[1, 1, 1], [2, 2, 2]]), "token_mean", 3)
    assert weights.tolist() == [[0.25, 0, 0], [0.25, 0.25, 0.25]]


def test_a_sample_without_a_token_counts_for_constant_length_alone():
    mask, ids = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([[1, 1, 2, 0]])
    assert token_weights(mask, ids, "sample_mean", 10).tolist() == [[0.5, 0.5, 0, 0]]
    assert token_weights(mask, ids, "constant_length", 10)[0].tolist() == pytest.approx([0.05, 0.05, 0, 0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_token_under_the_mask_weighs_nothing(aggregation):
    for ids in (torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)):
        weights = token_weights(torch.zeros(2, 5), ids, aggregation, 4)
        assert (weights == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masks_of_any_type_are_counted_in_float32(dtype, aggregation):
    """In bfloat16 counting stops at 256."""
    mask, ids = torch.ones(2, 3000), torch.tensor([[1], [2]]).expand(2, 3000)
    found = token_weights(mask.to(dtype), ids, aggregation, 3000)
    torch.testing.assert_close(found, token_weights(mask, ids, aggregation, 3000))
    assert float(found[0, 0]) == pytest.approx(1 / 6000)


def test_sums_of_samples():
    values, ids = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[2, 2, 0], [1, 4, 1]])
    assert sample_sums(values, ids).tolist() == [3, 10, 3, 0, 5]


def test_unknown_aggregations_are_refused():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        token_weights(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int64), "mean", 1)
