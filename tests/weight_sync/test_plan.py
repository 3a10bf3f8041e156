"""The shard-to-shard plan, compared with a twin that looks at every element."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from weight_sync import CoverageError
from weight_sync.plan import Transfer, plan_transfers
from weight_sync.sender import Region

SEEDS = range(300)


def region(name: str, shape: tuple[int, ...], *spans: tuple[int, int], dtype=torch.float32) -> Region:
    spans = spans or tuple((0, size) for size in shape)
    return Region(name, dtype, shape, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def elements(part: Region) -> set[tuple]:
    spans = [range(start, start + size) for start, size in zip(part.offsets, part.shape, strict=True)]
    return {(part.name, *index) for index in itertools.product(*spans)}


def union(regions) -> set[tuple]:
    return set().union(*map(elements, regions))


def random_cuts(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """A dimension in uneven pieces, some of them empty."""
    points = sorted(draw.choices(range(size + 1), k=draw.randint(0, 3)))
    return list(itertools.pairwise([0, *points, size]))


def random_grid(draw: random.Random, name: str, shape: tuple[int, ...]) -> list[Region]:
    """A whole tensor in rectangles: cut in one dimension, in several or in none."""
    return [region(name, shape, *spans) for spans in itertools.product(*(random_cuts(draw, size) for size in shape))]


def random_layout(seed: int):
    """Sender ranks that hold everything, some of it more than once, and receiver ranks that want parts."""
    draw = random.Random(seed)
    held = [[] for _ in range(draw.randint(1, 4))]
    wanted = [[] for _ in range(draw.randint(1, 4))]
    for number in range(draw.randint(1, 4)):
        name, shape = f"layer.{number}", tuple(draw.randint(0, 6) for _ in range(draw.randint(0, 3)))
        for part in random_grid(draw, name, shape):
            for rank in draw.sample(range(len(held)), draw.randint(1, len(held))):
                held[rank].append(part)
        if draw.random() < 0.3:  # another cut of the same elements, which overlaps the first
            draw.choice(held).extend(random_grid(draw, name, shape))
        for regions in wanted:
            grid = random_grid(draw, name, shape)
            regions += draw.sample(grid, draw.randint(0, len(grid)))
    same_process = {rank: rank for rank in range(min(len(held), len(wanted))) if draw.random() < 0.5}
    return held, wanted, same_process


@pytest.mark.parametrize("seed", SEEDS)
def test_every_wanted_element_travels_once_from_a_rank_that_holds_it(seed):
    held, wanted, same_process = random_layout(seed)
    transfers = plan_transfers(held, wanted, same_process)
    for destination, regions in enumerate(wanted):
        arrives = [element for t in transfers if t.destination == destination for element in elements(t.region)]
        local = union(held[same_process[destination]]) if destination in same_process else set()
        assert len(arrives) == len(set(arrives))
        assert set(arrives) == union(regions) - local
    for transfer in transfers:
        assert transfer.region.size > 0
        assert any(elements(transfer.region) <= elements(part) for part in held[transfer.source])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_element_that_nobody_holds_is_an_error_with_the_tensors_name(seed):
    held, wanted, _ = random_layout(seed)
    draw = random.Random(seed)
    lost = draw.choice([part for part in map(draw.choice, filter(None, held))])
    held = [[part for part in regions if part != lost] for regions in held]
    lacking = {name for regions in wanted for name, *_ in union(regions) - union(itertools.chain(*held))}
    lacking |= {part.name for regions in wanted for part in regions} - {part.name for part in itertools.chain(*held)}
    if not lacking:
        plan_transfers(held, wanted)
        return
    with pytest.raises(CoverageError) as error:
        plan_transfers(held, wanted)
    assert str(error.value).split()[0].rstrip(":") in lacking


def test_replicas_are_shared_out_by_bytes():
    tensors = [region(f"layer.{number}", (100 + number,)) for number in range(64)]
    transfers = plan_transfers([tensors] * 4, [tensors] * 2)
    loads = [sum(t.region.nbytes for t in transfers if t.source == rank) for rank in range(4)]
    assert sum(loads) == 2 * sum(part.nbytes for part in tensors)
    assert max(loads) - min(loads) <= max(part.nbytes for part in tensors)


def test_a_rank_that_must_send_much_is_spared_what_others_can_send():
    alone, both = region("alone", (100,)), region("both", (80,))
    transfers = plan_transfers([[both, alone], [both]], [[both, alone]])
    assert transfers == [Transfer(1, 0, both), Transfer(0, 0, alone)]


def test_rows_to_columns():
    """FSDP's rows to tensor parallelism's columns: each pair of ranks exchanges one block."""
    shape = (4, 6)
    rows = [[region("weight", shape, (0, 2), (0, 6))], [region("weight", shape, (2, 4), (0, 6))]]
    columns = [[region("weight", shape, (0, 4), (0, 3))], [region("weight", shape, (0, 4), (3, 6))]]
    blocks = {(t.source, t.destination): str(t.region) for t in plan_transfers(rows, columns)}
    assert blocks == {(0, 0): "[0:2, 0:3]", (1, 0): "[2:4, 0:3]", (0, 1): "[0:2, 3:6]", (1, 1): "[2:4, 3:6]"}


def test_a_region_that_is_wanted_twice_travels_once():
    whole, part = region("weight", (8,)), region("weight", (8,), (2, 5))
    assert [str(t.region) for t in plan_transfers([[whole]], [[part, whole]])] == ["[2:5]", "[0:2]", "[5:8]"]


@pytest.mark.parametrize(
    "want", [region("weight", (8,), dtype=torch.bfloat16), region("weight", (9,)), region("weight", (2, 4))]
)
def test_disagreement_about_dtype_or_shape(want):
    with pytest.raises(CoverageError, match=r"weight: receiver 0 wants .*, sender rank 1 holds torch.float32"):
        plan_transfers([[], [region("weight", (8,))]], [[want]])
