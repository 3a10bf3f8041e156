"""The layout made from all ranks' regions, against a brute-force count of every element."""

from __future__ import annotations

import random
import re

import pytest
import torch

from weight_sync import CoverageError, Shard, WeightSyncError
from weight_sync.sender import Region, make_layout


def region(name: str, shape: tuple, offsets: tuple, size: tuple, dtype=torch.float32) -> Region:
    return Region(name, dtype, shape, offsets, size)


def random_partition(rng: random.Random, shape: tuple, offsets: tuple, size: tuple, pieces: int) -> list[tuple]:
    """Boxes that make up a box exactly, by cutting at random."""
    cuttable = [dim for dim, extent in enumerate(size) if extent > 1]
    if pieces == 1 or not cuttable:
        return [(offsets, size)]
    dim = rng.choice(cuttable)
    at = rng.randrange(1, size[dim])
    low = (*size[:dim], at, *size[dim + 1 :])
    high = (*size[:dim], size[dim] - at, *size[dim + 1 :])
    moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    left = rng.randrange(1, pieces)
    return [
        *random_partition(rng, shape, offsets, low, left),
        *random_partition(rng, shape, moved, high, pieces - left),
    ]


def count(shape: tuple, boxes: list[tuple]) -> torch.Tensor:
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, size in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, size, strict=True))] += 1
    return counts


@pytest.mark.parametrize("seed", range(300))
def test_accepts_exactly_what_covers_every_element_once(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(0, 4)))
    boxes = random_partition(rng, shape, (0,) * len(shape), shape, rng.randrange(1, 7))
    if seed % 3 == 1 and len(boxes) > 1:
        boxes.remove(rng.choice(boxes))
    if seed % 3 == 2 and shape:
        size = tuple(rng.randrange(0, extent + 1) for extent in shape)
        boxes.append((tuple(rng.randrange(0, e - s + 1) for e, s in zip(shape, size, strict=True)), size))
        boxes = list(dict.fromkeys(boxes))  # an identical one would be a replica
    ranks = [[] for _ in range(3)]
    for offsets, size in boxes:
        ranks[rng.randrange(3)].append(region("w", shape, offsets, size))
    if bool((count(shape, boxes) == 1).all()):
        layout = make_layout(ranks)
        written = [(r.offsets, r.shape) for own in layout.writes for r in own]
        assert bool((count(shape, written) == 1).all())
    else:
        counts = count(shape, boxes)
        first = tuple((counts != 1).nonzero()[0].tolist())
        said = rf"none at {re.escape(str(list(first)))}:" if counts[first] == 0 else "overlaps region"
        with pytest.raises(CoverageError, match=rf"^w \[.*\]: .*{said}"):
            make_layout(ranks)


def test_missing_rows_are_named_with_the_numbers():
    ranks = [
        [region("ok", (2,), (0,), (2,)), region("mlp.w", (8, 4), (0, 0), (3, 4))],
        [region("mlp.w", (8, 4), (4, 0), (4, 4))],
    ]
    with pytest.raises(
        CoverageError,
        match=r"mlp\.w \[8, 4\]: 28 of 32 elements, none at \[3, 0\]: rank 0 \[0:3, 0:4\], rank 1 \[4:8, 0:4\]",
    ):
        make_layout(ranks)


def test_thousands_of_regions():
    """As a reshaped DTensor is held. Comparing every two of them would take a minute."""
    shape, side = (100, 100, 8), range(100)
    ranks = [[region("w", shape, (row, column, 0), (1, 1, 8)) for column in side] for row in side]
    assert sum(map(len, make_layout(ranks).writes)) == 10_000
    ranks[7][5] = region("w", shape, (7, 5, 1), (1, 1, 7))
    with pytest.raises(CoverageError, match=r"79999 of 80000 elements, none at \[7, 5, 0\]: .* and 9984 more$"):
        make_layout(ranks)
    ranks[7][5] = region("w", shape, (7, 4, 7), (1, 2, 1))
    with pytest.raises(CoverageError, match=r"\[7:8, 4:5, 0:8\] of rank 7 overlaps region \[7:8, 4:6, 7:8\] of rank 7"):
        make_layout(ranks)


def test_overlap_names_both_ranks():
    ranks = [[region("w", (4,), (0,), (3,))], [region("w", (4,), (2,), (2,))]]
    with pytest.raises(CoverageError, match=r"w \[4\]: region \[0:3\] of rank 0 overlaps region \[2:4\] of rank 1"):
        make_layout(ranks)


def test_an_overlap_does_not_make_up_for_a_gap():
    with pytest.raises(CoverageError, match="overlaps"):
        make_layout([[region("w", (4,), (0,), (2,))], [region("w", (4,), (1,), (2,))]])


@pytest.mark.parametrize(
    "other",
    [region("w", (4,), (2,), (2,), torch.bfloat16), region("w", (5,), (2,), (2,)), region("w", (4, 1), (2, 0), (2, 1))],
)
def test_ranks_that_disagree_are_refused(other):
    with pytest.raises(CoverageError, match=r"rank 0 says torch\.float32 \[4\], rank 1 says"):
        make_layout([[region("w", (4,), (0,), (2,))], [other]])


def test_the_same_region_twice_on_one_rank_is_refused():
    whole = region("w", (4,), (0,), (4,))
    with pytest.raises(CoverageError, match=r"rank 1 gives region \[0:4\] twice"):
        make_layout([[], [whole, whole]])


def test_nothing_to_publish_is_refused():
    with pytest.raises(CoverageError, match="no rank has a shard"):
        make_layout([[], []])


def test_replicas_are_written_once_and_shared_out():
    held = [region(f"w{i}", (100 + i,), (0,), (100 + i,)) for i in range(20)]
    layout = make_layout([list(held) for _ in range(4)])
    assert sorted(r.name for own in layout.writes for r in own) == sorted(r.name for r in held)
    loads = [sum(r.nbytes for r in own) for own in layout.writes]
    assert max(loads) < 1.2 * min(loads)


def test_empty_shards_of_uneven_cuts_are_fine():
    layout = make_layout([[region("w", (3, 2), (0, 0), (3, 2))], [region("w", (3, 2), (3, 0), (0, 2))]])
    assert layout.manifest.tensors[0].shape == (3, 2)


@pytest.mark.parametrize(("shape", "offsets"), [((4, 4), (3, 0)), ((4, 4), (-1, 0)), ((4,), (0,)), ((4, 4), (0,))])
def test_a_shard_must_lie_in_its_tensor(shape, offsets):
    with pytest.raises(WeightSyncError, match=r"layer\.w: a region of shape"):
        Shard("layer.w", shape, offsets, torch.zeros(2, 4))


def test_only_dense_tensors_can_be_sent():
    with pytest.raises(WeightSyncError, match=r"layer\.w: only dense tensors"):
        Shard.whole("layer.w", torch.eye(3).to_sparse())


def test_a_conjugate_view_is_sent_as_its_values():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert Shard.whole("layer.w", values.conj()).data.view(torch.float32).tolist() == [1, -2, 3, 4]
