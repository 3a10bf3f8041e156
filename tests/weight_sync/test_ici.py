"""The ici transport over gloo, between real processes: bytes, buckets, shards, and receivers that come and go."""

from __future__ import annotations

import ici_processes as ici
import pytest
import sync_processes as sp
import torch.distributed as dist
from remote_processes import Remote, on_all, start_ranks

from weight_sync import CoverageError, Manifest, Shard, StaleHandleError, WeightSyncError, open_receiver, open_sender
from weight_sync.hashing import xxh3_128


def as_received(tensors) -> dict:
    return {name: (str(t.dtype), tuple(t.shape), sp.bits(t)) for name, t in tensors.items()}


@pytest.fixture(scope="module")
def senders(tmp_path_factory):
    """One rank alone, and two."""
    ranks = {1: start_ranks(1, None), 2: start_ranks(2, tmp_path_factory.mktemp("gloo") / "store")}
    yield ranks
    for remotes in ranks.values():
        for remote in remotes:
            remote.kill()


@pytest.fixture(scope="module")
def engines():
    remotes = [Remote(), Remote()]
    yield remotes
    for remote in remotes:
        remote.kill()


@pytest.fixture
def opened(senders, run_id):
    """Opens a sender on so many ranks; closed afterwards."""
    used = []

    def open_on(world_size: int, **options) -> list[Remote]:
        used.extend(senders[world_size])
        on_all(senders[world_size], ici.open_ici, run_id, options)
        return senders[world_size]

    yield open_on
    if used:
        on_all(used, ici.close_sender)


@pytest.mark.parametrize("how", ["whole", "rows", "columns", "uneven"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_versions_arrive_byte_for_byte(opened, engines, world_size, how):
    ranks = opened(world_size)
    on_all(engines, ici.open_ici_receiver, {})
    for version in (1, 2, 3):
        handles = on_all(ranks, ici.publish, version, version, how)
        assert all(handle == handles[0] for handle in handles)
        expected = as_received(sp.policy(version))
        for got in on_all(engines, ici.receive, handles[0]):
            assert got == expected
        manifest = Manifest.from_json(ranks[0].call(ici.manifest))
        assert {entry.name: entry.xxh3_128 for entry in manifest.tensors} == {
            name: xxh3_128(data) for name, (_, _, data) in expected.items()
        }


@pytest.mark.parametrize(
    "buckets",
    [
        {"bucket_tensors": 1},
        {"bucket_tensors": 10},
        {"bucket_tensors": 1000},
        {"bucket_bytes": 100},
        {"bucket_bytes": 5000},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["whole", "columns"])
def test_buckets_of_any_size_agree(opened, engines, buckets, how):
    ranks = opened(2, **buckets)
    engines[0].call(ici.open_ici_receiver, {})
    handle = on_all(ranks, ici.publish, 1, 1, how)[0]
    assert engines[0].call(ici.receive, handle) == as_received(sp.policy(1))


@pytest.mark.parametrize("how", ["rows", "columns", "uneven"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_set_of_receivers_takes_the_regions_its_ranks_need(opened, engines, world_size, how):
    ranks = opened(world_size)
    for rank, engine in enumerate(engines):
        engine.call(ici.open_ici_receiver, {"rank": rank, "world_size": 2}, True)
    for version in (1, 2):
        handle = on_all(ranks, ici.publish, version, version, how)[0]
        got = on_all(engines, ici.receive, handle)
        for rank, tensors in enumerate(got):
            expected = {}
            for name, tensor in sp.policy(version).items():
                if tensor.dim() == 2:
                    size = tensor.shape[1]
                    tensor = tensor[:, rank * size // 2 : (rank + 1) * size // 2]
                expected[name] = tensor
            assert tensors == as_received(expected)


def test_receivers_join_whenever_they_like(opened, engines):
    ranks = opened(2)
    newest = None
    for version in range(1, 4):
        newest = on_all(ranks, ici.publish, version, version, "rows")[0]
        engines[0].call(ici.open_ici_receiver, {})  # the receiver before it was never closed
        assert engines[0].call(ici.receive, newest) == as_received(sp.policy(version))
    engines[1].call(ici.open_ici_receiver, {})
    assert engines[1].call(ici.receive, newest) == as_received(sp.policy(3))
    assert engines[0].call(ici.receive, newest) == as_received(sp.policy(3))  # once more


def test_other_tensors_and_other_cuts_in_the_next_version(opened, engines):
    ranks = opened(2)
    engines[0].call(ici.open_ici_receiver, {})
    for version, how in enumerate(("rows", "columns", "whole", "uneven")):
        handle = on_all(ranks, ici.publish, version, version, how)[0]
        assert engines[0].call(ici.receive, handle) == as_received(sp.policy(version))
    handle = on_all(ranks, ici.publish_rows, 9, 10, 3)[0]
    assert engines[0].call(ici.receive_rows, handle) == {"first": {9.0}, "second": {10.0}}


def test_a_link_that_was_given_up_for_long_disuse(opened, engines):
    ranks = opened(2)
    on_all(engines, ici.open_ici_receiver, {})
    for version in range(1, 31):
        handle = on_all(ranks, ici.publish, version, version, "rows")[0]
        if version in (1, 30):
            assert engines[1].call(ici.receive, handle) == as_received(sp.policy(version))
        assert engines[0].call(ici.receive, handle) == as_received(sp.policy(version))


def test_a_version_stays_until_the_publish_after_the_next(opened, engines):
    ranks = opened(1)
    engines[0].call(ici.open_ici_receiver, {})
    handles = [on_all(ranks, ici.publish, version, version, "whole")[0] for version in (1, 2, 3)]
    with pytest.raises(StaleHandleError, match="version 1 was overwritten by a later one"):
        engines[0].call(ici.receive, handles[0])
    for version in (2, 3):
        assert engines[0].call(ici.receive, handles[version - 1]) == as_received(sp.policy(version))


def test_tensors_last_until_the_next_receive(opened):
    ranks = opened(1)
    receiver = open_receiver("ici", timeout_s=60)
    handles = [on_all(ranks, ici.publish, version, version, "whole")[0] for version in (1, 2)]
    first = receiver.receive(handles[0])
    first.check()
    receiver.receive(handles[1]).check()
    with pytest.raises(StaleHandleError, match="version 1 was overwritten by the receive after it"):
        first.check()
    receiver.close()


def test_a_publish_that_fails_leaves_the_version_before_it(opened, engines):
    ranks = opened(2)
    engines[0].call(ici.open_ici_receiver, {})
    handle = on_all(ranks, ici.publish, 1, 1, "rows")[0]
    with pytest.raises(WeightSyncError, match="rank 1: OSError: device lost"):
        on_all(ranks, sp.publish_failing, 2, 1)
    assert engines[0].call(ici.receive, handle) == as_received(sp.policy(1))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CoverageError, match=rf"{name} \[11, 130\]: 780 of 1430 elements, none at"):
        on_all(ranks, sp.publish_without, 2, name, 1)
    handle = on_all(ranks, ici.publish, 3, 3, "rows")[0]
    assert engines[0].call(ici.receive, handle) == as_received(sp.policy(3))


def test_hashes_can_be_left_out(opened, engines):
    ranks = opened(2, hashes=False)
    handle = on_all(ranks, ici.publish, 1, 1, "rows")[0]
    engines[0].call(ici.open_ici_receiver, {})
    with pytest.raises(WeightSyncError, match="sent without hashes and cannot be verified"):
        engines[0].call(ici.receive, handle)
    engines[0].call(ici.open_ici_receiver, {"verify": False})
    assert engines[0].call(ici.receive, handle) == as_received(sp.policy(1))


def test_a_set_whose_other_rank_stays_away(opened, engines):
    ranks = opened(1)
    handle = on_all(ranks, ici.publish, 1, 1, "whole")[0]
    for rank in (0, 1):
        engines[rank].call(ici.open_ici_receiver, {"rank": rank, "world_size": 2, "timeout_s": 1})
        with pytest.raises(WeightSyncError, match="version 1 did not arrive: no set/receivers/"):
            engines[rank].call(ici.receive, handle)


def test_a_closed_sender_is_a_clear_error(senders, engines, run_id):
    ranks = senders[1]
    on_all(ranks, ici.open_ici, run_id, {})
    handle = on_all(ranks, ici.publish, 1, 1, "whole")[0]
    engines[0].call(ici.open_ici_receiver, {})
    engines[0].call(ici.receive, handle)
    on_all(ranks, ici.close_sender)
    for remote, options in ((engines[0], None), (engines[1], {})):  # one that knew it and one that did not
        if options is not None:
            remote.call(ici.open_ici_receiver, options)
        with pytest.raises(StaleHandleError, match=r"version 1: the sender at \S+ is gone"):
            remote.call(ici.receive, handle)


@pytest.mark.parametrize("extended_api", [False, True])
def test_a_backend_that_was_registered_with_torch(run_id, extended_api):
    """As accelerators' backends come, found by the kind of device."""
    made = []

    def create(*args):
        if extended_api:
            args = args[0].store, args[0].group_rank, args[0].group_size, args[0].timeout
        made.append(args[1:3])
        return dist.ProcessGroupGloo(*args[:3], timeout=args[3])

    name = f"registered_{extended_api}".lower()
    dist.Backend.register_backend(name, create, extended_api=extended_api, devices=["cpu"])
    sender = open_sender("ici", run_id=run_id, backend=f"cpu:{name},cuda:nccl", timeout_s=30)
    receiver = open_receiver("ici", timeout_s=30)
    tensors = sp.policy(1)
    with receiver.receive(sender.publish(1, [Shard.whole(*item) for item in tensors.items()])) as received:
        assert as_received(received.tensors) == as_received(tensors)
    assert sorted(made) == [(0, 2), (1, 2)]
    receiver.close()
    sender.close()


def test_a_backend_that_does_not_know_the_device(run_id):
    with pytest.raises(WeightSyncError, match="backend nccl does not move tensors of cpu; it knows cuda"):
        open_sender("ici", run_id=run_id, backend="nccl")
