"""Every way a trainer's ranks may hold a policy, over every transport: what arrives is what was there before it was cut.

Real ranks (gloo) with real FSDP2 and tensor-parallel parameters, a receiver in a process of its own.
"""

from __future__ import annotations

import math

import dtensor_processes as dp
import pytest
import sync_processes as sp
import torch
from remote_processes import Remote, on_all, start_ranks
from transport_options import sender_options

from weight_sync import Manifest
from weight_sync.transport import TRANSPORTS

SHARDINGS = {
    "one_rank": (1,),
    "fsdp": (2,),
    "fsdp-4": (4,),
    "fsdp_columns": (2,),
    "fsdp_columns-4": (4,),
    "tensor_parallel": (2,),
    "tensor_parallel-4": (4,),
    "fsdp_of_tensor_parallel": (2, 2),
    "hsdp": (4,),
    "tied": (2,),
    "tied_under_two_names": (2,),
    "grid": (4,),
    "reshaped": (2,),
    "reshaped-4": (4,),
}
"""What the builder of that name is told; its product is the number of ranks."""


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Trainers of so many ranks, started when first asked for."""
    started: dict[int, list[Remote]] = {}

    def trainer(world_size: int) -> list[Remote]:
        if world_size not in started:
            started[world_size] = start_ranks(world_size, tmp_path_factory.mktemp("gloo") / "store")
        return started[world_size]

    yield trainer
    for remotes in started.values():
        for remote in remotes:
            remote.kill()


@pytest.fixture(scope="module")
def engine_process():
    remote = Remote()
    yield remote
    remote.kill()


@pytest.fixture
def receiver(engine_process):
    """An engine's process; its receiver is a new one in every test."""
    yield engine_process
    engine_process.call(dp.close_receiver)


def build(trainers, sharding: str) -> tuple[list[Remote], dict[str, list[str]]]:
    sizes = SHARDINGS[sharding]
    ranks = trainers(math.prod(sizes))
    return ranks, on_all(ranks, dp.build, sharding.partition("-")[0], *sizes)[0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as_it_is", "bfloat16"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_sharding(trainers, receiver, run_id, tmp_path, transport, sharding, dtype):
    ranks, _ = build(trainers, sharding)
    on_all(ranks, dp.open_for, transport, run_id, sender_options(transport, tmp_path))
    handles = on_all(ranks, dp.publish, 1, dtype)
    assert handles == handles[:1] * len(ranks)
    expected = on_all(ranks, dp.expected, dtype)[0]
    assert receiver.call(dp.receive, transport, handles[0]) == expected
    on_all(ranks, sp.close_sender)


@pytest.mark.parametrize("sharding", ["one_rank", "fsdp-4", "fsdp_of_tensor_parallel"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_an_optimizer_step_the_new_bytes_arrive(trainers, receiver, run_id, tmp_path, transport, sharding):
    """AdamW on float32 masters at a learning rate that bfloat16 mostly rounds away; the manifests name what it moved."""
    ranks, _ = build(trainers, sharding)
    on_all(ranks, dp.open_for, transport, run_id, sender_options(transport, tmp_path))
    found, expected, manifests = [], [], []
    for version in range(3):
        handle = on_all(ranks, dp.publish, version, torch.bfloat16)[0]
        found.append(receiver.call(dp.receive, transport, handle))
        expected.append(on_all(ranks, dp.expected, torch.bfloat16)[0])
        manifests.append(Manifest.from_json(ranks[0].call(sp.sender_manifest)))
        on_all(ranks, dp.train)
    assert found == expected
    for before, after, old, new in zip(manifests, manifests[1:], expected, expected[1:], strict=False):
        diff = before.diff(after)
        assert (diff.added, diff.missing) == ([], [])
        assert set(diff.changed) == {name for name in new if new[name] != old[name]}
        assert "norm.weight" in diff.unchanged
    assert expected[0] != expected[-1]
    on_all(ranks, sp.close_sender)


def test_the_placements_are_those_that_are_meant(trainers):
    """So that a builder that shards otherwise one day does not go unnoticed."""
    placements = {sharding: build(trainers, sharding)[1] for sharding in SHARDINGS}
    assert placements["fsdp-4"]["scale"] == ["S(0)"]
    assert placements["fsdp_columns"]["up.weight"] == ["S(1)"]
    assert placements["tensor_parallel"]["down.weight"] == ["S(1)"]
    assert placements["tensor_parallel"]["norm.weight"] == ["R"]
    assert placements["fsdp_of_tensor_parallel"]["up.weight"] == ["_S(0, 2)", "S(0)"]
    assert placements["fsdp_of_tensor_parallel"]["down.weight"] == ["S(0)", "S(1)"]
    assert placements["hsdp"]["up.weight"] == ["R", "S(0)"]
    assert placements["reshaped"]["flattened"] == ["_S(0, 6)"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fsdp_cuts_unevenly_what_tensor_parallelism_left(trainers, receiver, run_id, tmp_path, transport):
    """13 rows over 3 x 2 ranks: the place of a strided shard follows from no even division."""
    ranks = trainers(6)
    on_all(ranks, dp.build, "fsdp_of_tensor_parallel", 3, 2)
    on_all(ranks, dp.open_for, transport, run_id, sender_options(transport, tmp_path))
    handle = on_all(ranks, dp.publish, 1, None)[0]
    assert receiver.call(dp.receive, transport, handle) == on_all(ranks, dp.expected, None)[0]
    on_all(ranks, sp.close_sender)


def test_partial_sums_are_refused(trainers):
    for answer in on_all(trainers(2), dp.partial_sums):
        assert answer.startswith("bias: a DTensor of partial sums (Partial(sum),) must be reduced")


def test_a_local_tensor_that_its_placements_do_not_explain_is_refused(trainers):
    for answer in on_all(trainers(2), dp.foreign_local):
        assert answer.startswith(
            "bias: a local tensor of shape [4, 2] is not what placements (Shard(dim=0),) on a mesh"
        )
