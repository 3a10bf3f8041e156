"""Real ranks and engines in processes of their own, real files in /dev/shm."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import sync_processes as sp
import torch
from sync_processes import Remote

import weight_sync
from weight_sync import (
    CoverageError,
    Manifest,
    Receiver,
    Shard,
    SpaceError,
    StaleHandleError,
    VerificationError,
    WeightSyncError,
    open_receiver,
    open_sender,
)
from weight_sync.shared_memory.segments import HEADER_BYTES


def segments(run_id: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"weight_sync.{run_id}.*"))


def on_all(remotes: list[Remote], function, *args) -> list:
    """Results of a collective call; an error is the result of the rank that raised it."""
    for remote in remotes:
        remote.start(function, *args)
    results = []
    for remote in remotes:
        try:
            results.append(remote.finish())
        except Exception as error:
            results.append(error)
    return results


# --- bytes arrive ---


@pytest.mark.parametrize("slots", [1, 2])
def test_one_rank_without_a_process_group(engine, run_id, slots):
    sender = open_sender("shared_memory", run_id=run_id, slots=slots)
    for version in range(5):
        handle = sender.publish(version, sp.shards_of(sp.policy(version), 0, 1, "rows"))
        assert handle == json.loads(json.dumps(handle))
        assert handle["version"] == version
        assert engine.call(sp.receive, handle) == sp.expected(version)
    assert len(segments(run_id)) == slots
    sender.close()
    assert segments(run_id) == []


@pytest.mark.parametrize("how", ["rows", "columns", "uneven"])
def test_two_ranks_write_their_own_shards(engine, ranks, run_id, how):
    on_all(ranks, sp.open_for, run_id, {})
    for version in range(3):
        handles = on_all(ranks, sp.publish, version, version, how)
        assert handles[0] == handles[1]
        assert engine.call(sp.receive, handles[0]) == sp.expected(version)
    manifests = on_all(ranks, sp.sender_manifest)
    assert manifests[0] == manifests[1]
    assert [t.name for t in Manifest.from_json(manifests[0]).tensors] == list(sp.policy(0))
    on_all(ranks, sp.close_sender)
    assert segments(run_id) == []


def test_layout_may_change_between_versions(engine, ranks, run_id):
    on_all(ranks, sp.open_for, run_id, {})
    for version, how in enumerate(["rows", "columns", "uneven", "rows"]):
        handle = on_all(ranks, sp.publish, version, version, how)[0]
        assert engine.call(sp.receive, handle) == sp.expected(version)
        assert len(segments(run_id)) == 2
    on_all(ranks, sp.close_sender)


def test_parameters_are_converted_while_they_are_copied(run_id):
    master = torch.nn.Parameter(torch.randn(40, 30))
    sender = open_sender("shared_memory", run_id=run_id)
    handle = sender.publish(1, [Shard.whole("w", master.t(), dtype=torch.bfloat16)])
    with open_receiver("shared_memory").receive(handle) as received:
        assert torch.equal(received.tensors["w"], master.detach().t().to(torch.bfloat16))
        assert not received.tensors["w"].requires_grad
    sender.close()


def test_sender_knows_what_a_version_changed(run_id):
    sender = open_sender("shared_memory", run_id=run_id)
    tensors = sp.policy(0)
    sender.publish(0, [Shard.whole(name, t) for name, t in tensors.items()])
    before = sender.manifest
    frozen = "model.layers.0.input_layernorm.weight"
    tensors = sp.policy(1) | {frozen: tensors[frozen]}
    sender.publish(1, [Shard.whole(name, t) for name, t in tensors.items()])
    assert before.diff(sender.manifest).unchanged == [frozen, "model.layers.0.unused"]
    assert sender.stats["total_bytes"] == sender.manifest.total_bytes
    assert sender.stats["total_s"] > 0
    sender.close()


def test_a_loader_that_modifies_tensors_in_place_harms_nobody(engine, run_id):
    """The engine adds 1 in place; it, and another receiver, still see every later version as sent."""
    sender, other = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    for version in range(6):
        weight = torch.full((3000,), float(version))
        handle = sender.publish(version, [Shard.whole("norm", weight)])
        assert engine.call(sp.receive_and_scale, handle, "norm") == float(version + 1)
        with other.receive(handle) as received:
            assert torch.equal(received.tensors["norm"], weight)
        assert engine.call(sp.receive, handle)["norm"][2] == sp.bits(weight)
    sender.close()


# --- what is not whole is refused ---


def flip_byte(handle: dict, name: str, manifest: Manifest) -> None:
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    with open(handle["path"], "r+b") as file:
        file.seek(HEADER_BYTES + entry.offset + entry.nbytes - 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x80]))  # a sign, which a sum of floats may not see


@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm.weight", "model.layers.0.router.bias"])
def test_one_corrupt_byte_is_refused_and_the_tensor_named(engine, run_id, name):
    sender = open_sender("shared_memory", run_id=run_id)
    handle = sender.publish(7, [Shard.whole(n, t) for n, t in sp.policy(7).items()])
    flip_byte(handle, name, sender.manifest)
    with pytest.raises(VerificationError, match=name) as caught:
        engine.call(sp.receive, handle)
    assert caught.value.tensors == [name]
    handle = sender.publish(8, [Shard.whole(n, t) for n, t in sp.policy(8).items()])
    assert engine.call(sp.receive, handle) == sp.expected(8)
    sender.close()


def test_damaged_manifest_is_refused(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    handle = sender.publish(7, [Shard.whole("w", torch.zeros(4))])
    for damaged in (handle | {"manifest_xxh3_128": "0" * 32}, handle | {"manifest_bytes": 10**9}):
        with pytest.raises(WeightSyncError, match=r"version 7: the manifest .* is damaged"):
            receiver.receive(damaged)
    sender.close()


def test_unhashed_weights_need_a_receiver_that_does_not_verify(run_id):
    sender = open_sender("shared_memory", run_id=run_id, hashes=False)
    receiver = open_receiver("shared_memory", verify=False)
    for version in range(4):
        handle = sender.publish(version, [Shard.whole("w", torch.full((5,), version))])
        with receiver.receive(handle) as received:
            assert received.tensors["w"].tolist() == [version] * 5
            received.tensors["w"].zero_()
    with pytest.raises(WeightSyncError, match="without hashes"):
        open_receiver("shared_memory").receive(handle)
    sender.close()


def test_overwritten_slot_is_refused(engine, run_id):
    sender = open_sender("shared_memory", run_id=run_id)
    handles = [sender.publish(version, [Shard.whole("w", torch.full((9,), version))]) for version in range(3)]
    with pytest.raises(StaleHandleError, match=r"version 0 is no longer in .*publish 3 has overwritten publish 1"):
        engine.call(sp.receive, handles[0])
    for handle in handles[1:]:
        engine.call(sp.receive, handle)
    sender.close()


def test_overwriting_while_an_engine_loads_is_noticed(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")

    def publish(version: int) -> dict:
        return sender.publish(version, [Shard.whole("w", torch.full((9,), version))])

    with receiver.receive(publish(0)) as received:
        publish(1)  # goes to the other segment
    received.check()
    with pytest.raises(StaleHandleError), receiver.receive(publish(2)):  # noqa: PT012
        publish(3)
        publish(4)
    with pytest.raises(ZeroDivisionError), receiver.receive(publish(5)):  # noqa: PT012
        publish(6)
        publish(7)
        raise ZeroDivisionError  # the loader's own error is the one to see
    sender.close()


@pytest.mark.parametrize("verify", [True, False])
def test_no_mixture_of_versions_is_ever_accepted(worker, run_id, tmp_path, verify):
    """A sender overwrites its segments as fast as it can while this process copies out of them, until both happened:
    versions that arrived whole and versions that were overtaken."""
    newest, stop, numel = tmp_path / "newest.json", tmp_path / "stop", 300_000
    worker.call(sp.open_for, run_id, {"hashes": verify})
    worker.start(sp.publish_until, str(stop), numel, str(newest))
    try:
        _race(open_receiver("shared_memory", verify=verify), newest)
    finally:
        stop.touch()
        worker.finish()
        worker.call(sp.close_sender)


def _race(receiver: Receiver, newest: Path) -> None:
    accepted, refused, tries = set(), 0, 0
    deadline = time.monotonic() + 60
    while len(accepted) < 20 or refused < 20:
        assert time.monotonic() < deadline, f"{len(accepted)} versions accepted, {refused} refused"
        tries += 1
        if not newest.exists():
            continue
        handle = json.loads(newest.read_text())
        try:
            with receiver.receive(handle) as received:
                time.sleep(0.005 * (tries % 3))
                copy = received.tensors["weight"].clone()
        except StaleHandleError:
            refused += 1
            continue
        assert copy.unique().tolist() == [handle["version"]]
        accepted.add(handle["version"])


# --- ranks fail together ---


def test_missing_coverage_names_the_tensor_on_every_rank(engine, ranks, run_id):
    on_all(ranks, sp.open_for, run_id, {})
    good = on_all(ranks, sp.publish, 1, 1, "rows")[0]
    on_all(ranks, sp.publish, 2, 2, "rows")
    name = "model.layers.0.mlp.up_proj.weight"
    errors = on_all(ranks, sp.publish_without, 3, name, 1)
    assert [type(error) for error in errors] == [CoverageError, CoverageError]
    assert all(str(error).startswith(f"{name} [11, 130]: 780 of 1430 elements") for error in errors)
    handle = on_all(ranks, sp.publish, 4, 4, "rows")[0]
    assert engine.call(sp.receive, handle) == sp.expected(4)
    with pytest.raises(StaleHandleError):
        engine.call(sp.receive, good)
    on_all(ranks, sp.close_sender)


def test_a_failed_publish_spares_the_version_before(engine, ranks, run_id):
    on_all(ranks, sp.open_for, run_id, {})
    on_all(ranks, sp.publish, 1, 1, "rows")
    good = on_all(ranks, sp.publish, 2, 2, "rows")[0]
    for version in (3, 4, 5):
        errors = on_all(ranks, sp.publish_failing, version, 1)
        assert [str(error) for error in errors] == ["rank 1: OSError: device lost"] * 2
        assert engine.call(sp.receive, good) == sp.expected(2)
    handle = on_all(ranks, sp.publish, 6, 6, "rows")[0]
    assert engine.call(sp.receive, handle) == sp.expected(6)
    on_all(ranks, sp.close_sender)


def test_ranks_at_different_versions_are_told(ranks, run_id):
    on_all(ranks, sp.open_for, run_id, {})
    ranks[0].start(sp.publish, 1, 1, "rows")
    ranks[1].start(sp.publish, 2, 1, "rows")
    for remote in ranks:
        with pytest.raises(WeightSyncError, match=r"the ranks publish different versions: \[1, 2\]"):
            remote.finish()
    on_all(ranks, sp.close_sender)


def test_a_dead_rank_ends_the_wait_of_the_others(run_id, tmp_path):
    pair = [Remote(), Remote()]
    try:
        for rank, remote in enumerate(pair):
            remote.start(sp.join, rank, 2, str(tmp_path / "store"), 20)
        for remote in pair:
            remote.finish()
        on_all(pair, sp.open_for, run_id, {})
        on_all(pair, sp.publish, 1, 1, "rows")
        pair[1].kill()
        with pytest.raises(WeightSyncError, match="rank 0 of 2 lost the other ranks"):
            pair[0].call(sp.publish, 2, 2, "rows")
    finally:
        for remote in pair:
            remote.kill()


def test_a_sender_of_several_ranks_needs_a_group(run_id):
    with pytest.raises(WeightSyncError, match="2 ranks needs a process group"):
        open_sender("shared_memory", run_id=run_id, rank=0, world_size=2)


# --- resources ---


def test_too_little_space_is_told_with_the_numbers(run_id):
    sender = open_sender("shared_memory", run_id=run_id)
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(10**13)
    with pytest.raises(
        SpaceError, match=r"/dev/shm has [\d.]+ GB free .* 2 segment.s. of 20000.00 GB need 40000.00 GB.*shm-size"
    ):
        sender.publish(0, [Shard.whole("huge", huge)])
    assert segments(run_id) == []
    sender.publish(0, [Shard.whole("small", huge[:10])])
    assert len(segments(run_id)) == 2
    sender.close()


@pytest.mark.parametrize("senders", ["worker", "ranks"])
def test_a_hundred_syncs_leave_everything_flat(request, engine, run_id, senders):
    """One sender, then two ranks: files, threads, segments and memory, but for allocators' slack, as after the third."""
    numel, senders = 1_000_000, request.getfixturevalue(senders)
    senders = senders if isinstance(senders, list) else [senders]

    def sync(versions: range) -> list[dict]:
        for version in versions:
            handle = on_all(senders, sp.publish_rows_of_constant, version, numel)[0]
            engine.call(sp.receive_and_scale, handle, "weight")
        return [remote.call(sp.footprint) | {"segments": segments(run_id)} for remote in (*senders, engine)]

    on_all(senders, sp.open_for, run_id, {})
    before, after = sync(range(1, 4)), sync(range(4, 104))
    for start, end in zip(before, after, strict=True):
        growth = end.pop("rss_bytes") - start.pop("rss_bytes")
        assert growth < 4 * numel, f"grew by {growth} bytes, more than one version, over 100 syncs"
        assert start == end
    on_all(senders, sp.close_sender)


def test_segments_of_a_killed_owner_are_removed_and_no_others(engine, trainer, run_id):
    mine = open_sender("shared_memory", run_id=f"{run_id}.alive")  # a name that begins with the other run's
    handle = mine.publish(1, [Shard.whole("w", torch.zeros(4))])
    trainer.call(sp.open_for, run_id, {})
    trainer.call(sp.publish_constant, 1, 8)
    theirs = segments(run_id + ".[0-9]*")
    assert len(theirs) == 2
    assert not set(theirs) & set(weight_sync.remove_stale_segments())
    trainer.kill()
    assert set(theirs) <= set(weight_sync.remove_stale_segments())
    assert not any(path.exists() for path in theirs)
    engine.call(sp.receive, handle)
    assert weight_sync.remove_segments(run_id) == []
    assert len(weight_sync.remove_segments(f"{run_id}.alive")) == 2


def test_handle_of_a_removed_run_is_stale(run_id):
    sender = open_sender("shared_memory", run_id=run_id)
    handle = sender.publish(3, [Shard.whole("w", torch.zeros(4))])
    sender.close()
    with pytest.raises(StaleHandleError, match=r"version 3: .* is not on host .*; it was written on host"):
        open_receiver("shared_memory").receive(handle)


def test_a_receiver_drops_the_mappings_of_removed_segments(run_id):
    before = sp.footprint({})["mappings"]  # what other tests of this process still hold
    receiver = open_receiver("shared_memory")
    for _ in range(4):
        sender = open_sender("shared_memory", run_id=run_id)
        for version in range(3):
            handle = sender.publish(version, [Shard.whole("w", torch.zeros(4))])
            receiver.receive(handle).check()
        sender.close()
        del sender
    assert sp.footprint({})["mappings"] <= before + 2
    receiver.close()
    assert sp.footprint({})["mappings"] <= before


def test_tensors_outlive_their_receiver_and_sender(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    received = receiver.receive(sender.publish(3, [Shard.whole("w", torch.arange(5))]))
    receiver.close()
    sender.close()
    received.check()
    assert received.tensors["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("run_id_given", ["a/b", "", "spät", "x" * 200])
def test_run_id_must_be_part_of_a_file_name(run_id_given):
    with pytest.raises(WeightSyncError, match=r"run id .* cannot be part of a file name"):
        open_sender("shared_memory", run_id=run_id_given)


def test_a_handle_of_another_version_than_its_segment(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    handle = sender.publish(3, [Shard.whole("w", torch.arange(5))])
    with pytest.raises(WeightSyncError, match="the handle says version 4, what it leads to is 3"):
        receiver.receive(handle | {"version": 4})
    assert receiver.receive(handle).version == 3
    sender.close()
