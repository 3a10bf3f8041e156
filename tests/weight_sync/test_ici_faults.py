"""What the ici transport does when bytes, senders or receivers are lost on the way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ici_processes as ici
import pytest
import sync_processes as sp
from remote_processes import Remote, on_all, start_ranks

from weight_sync import VerificationError, WeightSyncError

TIMEOUT_S = 10.0
"""Of senders and receivers here; generous for a busy machine, short beside the tests' own deadlines."""


def as_received(version: int) -> dict:
    return {name: (str(t.dtype), tuple(t.shape), sp.bits(t)) for name, t in sp.policy(version).items()}


@pytest.fixture
def start(tmp_path, run_id):
    """Starts processes that a test may kill: so many sender ranks, and receivers."""
    remotes = []

    def senders(world_size: int, **options) -> list[Remote]:
        ranks = start_ranks(world_size, tmp_path / f"store-{len(remotes)}")
        remotes.extend(ranks)
        on_all(ranks, ici.open_ici, run_id, {"timeout_s": TIMEOUT_S, "bucket_tensors": 1, **options})
        return ranks

    def receivers(count: int, **options) -> list[Remote]:
        engines = [Remote() for _ in range(count)]
        remotes.extend(engines)
        on_all(engines, ici.open_ici_receiver, {"timeout_s": TIMEOUT_S, **options})
        return engines

    start.senders, start.receivers = senders, receivers
    yield start
    for remote in remotes:
        remote.kill()


def publish(ranks: list[Remote], version: int, how: str = "rows") -> dict:
    return on_all(ranks, ici.publish, version, version, how)[0]


@pytest.mark.parametrize(("world_size", "message", "tensor"), [(1, 2, "experts"), (2, 1, "embed_tokens")])
def test_a_flipped_byte_names_the_tensor_and_the_next_sync_works(start, world_size, message, tensor):
    ranks, (engine,) = start.senders(world_size), start.receivers(1)
    assert engine.call(ici.receive, publish(ranks, 1)) == as_received(1)
    handle = publish(ranks, 2)
    ranks[-1].call(ici.flip_a_byte, message)
    with pytest.raises(VerificationError, match=f"version 2: xxh3-128 of 1 tensor.s. differs .*{tensor}"):
        engine.call(ici.receive, handle)
    assert engine.call(ici.receive, handle) == as_received(2)  # once more, undisturbed
    assert engine.call(ici.receive, publish(ranks, 3)) == as_received(3)


def test_a_flipped_byte_on_the_way_to_receivers_of_regions(start):
    ranks, engines = start.senders(2), start.receivers(2)
    for rank, engine in enumerate(engines):
        engine.call(ici.open_ici_receiver, {"rank": rank, "world_size": 2, "timeout_s": TIMEOUT_S}, True)
    handle = publish(ranks, 1)
    ranks[0].call(ici.flip_a_byte, 1)  # to receiver 0
    for engine in engines:
        engine.start(ici.receive, handle)
    with pytest.raises(VerificationError, match=r"version 1: xxh3-128 of 1 tensor.s. differs .*embed_tokens"):
        engines[0].finish()
    engines[1].finish()
    on_all(engines, ici.receive, publish(ranks, 2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sender_that_dies_while_it_sends(start, victim):
    ranks, (engine,) = start.senders(2), start.receivers(1)
    engine.call(ici.receive, publish(ranks, 1))
    handle = publish(ranks, 2)
    ranks[victim].call(ici.die_sending, 3)
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"^version 2.* (did not arrive|is gone): .+$"):
        engine.call(ici.receive, handle)
    assert time.monotonic() - begin < 5 * TIMEOUT_S
    assert not ranks[victim].process.is_alive()
    # The survivor cannot publish alone; new senders serve the same receiver.
    with pytest.raises(WeightSyncError):
        ranks[1 - victim].call(ici.publish, 3, 3, "rows")
    assert engine.call(ici.receive, publish(start.senders(2), 3)) == as_received(3)


def test_a_receiver_that_dies_while_it_receives_breaks_only_its_own_link(start):
    ranks, (victim, other) = start.senders(2), start.receivers(2)
    on_all([victim, other], ici.receive, publish(ranks, 1))
    handle = publish(ranks, 2)
    victim.call(ici.signal_receiving, 3, signal.SIGKILL)
    victim.start(ici.receive, handle)
    victim.process.join(30)
    assert victim.process.exitcode == -signal.SIGKILL
    assert other.call(ici.receive, handle) == as_received(2)
    (newcomer,) = start.receivers(1)
    assert newcomer.call(ici.receive, handle) == as_received(2)
    for version in (3, 4):
        handle = publish(ranks, version)
        assert on_all([other, newcomer], ici.receive, handle) == [as_received(version)] * 2


def test_a_receiver_that_hangs_holds_nobody_up_for_longer_than_the_deadline(start):
    ranks, (stuck, other) = start.senders(2, timeout_s=4), start.receivers(2)
    on_all([stuck, other], ici.receive_rows, on_all(ranks, ici.publish_rows, 1, 6, 1_000_000)[0])
    handle = on_all(ranks, ici.publish_rows, 2, 6, 1_000_000)[0]
    stuck.call(ici.signal_receiving, 2, signal.SIGSTOP)
    stuck.start(ici.receive_rows, handle)
    while "T (stopped)" not in Path(f"/proc/{stuck.process.pid}/status").read_text():
        time.sleep(0.01)
    assert other.call(ici.receive_rows, handle) == {"first": {2.0}, "second": {3.0}}
    for version in (3, 4):  # the snapshot that it was taking is reused
        handle = on_all(ranks, ici.publish_rows, version, 6, 1_000_000)[0]
        assert other.call(ici.receive_rows, handle) == {"first": {version}, "second": {version + 1}}
    os.kill(stuck.process.pid, signal.SIGCONT)
    with pytest.raises(WeightSyncError, match="version 2"):
        stuck.finish()
    assert stuck.call(ici.receive_rows, handle) == {"first": {4.0}, "second": {5.0}}


def test_a_receiver_that_died_before_it_said_what_it_wants(start):
    (rank,), (engine,) = start.senders(1), start.receivers(1)
    handle = publish([rank], 1, "whole")
    engine.call(ici.draw_a_number, handle)
    assert engine.call(ici.receive, handle) == as_received(1)


def test_training_and_publishing_go_on_while_a_version_is_taken(start):
    """A version that is being taken is whole, whatever the sender publishes meanwhile."""
    ranks, engines = start.senders(2, bucket_bytes=1 << 20), start.receivers(2)
    handle = on_all(ranks, ici.publish_rows, 0, 8, 500_000)[0]
    for version in range(1, 16):
        for engine in engines:
            engine.start(ici.receive_rows, handle)
        newer = on_all(ranks, ici.publish_rows, version, 8, 500_000)[0]
        for engine in engines:
            assert engine.finish() == {"first": {version - 1.0}, "second": {float(version)}}
        handle = newer


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_many_versions_leave_nothing_behind(start, world_size):
    ranks, engines = start.senders(world_size, bucket_tensors=None), start.receivers(2)
    everyone = [*ranks, *engines]
    before = None
    for version in range(40):
        handle = on_all(ranks, ici.publish_rows, version, 6, 200_000)[0]
        on_all(engines, ici.receive_rows, handle)
        if version == 10:
            before = on_all(everyone, sp.footprint)
    for early, late in zip(before, on_all(everyone, sp.footprint), strict=True):
        assert late["fds"] == early["fds"]
        assert late["threads"] <= early["threads"]
        assert late["rss_bytes"] < early["rss_bytes"] + 8e6


def test_receivers_that_come_and_go_leave_nothing_behind(start):
    (rank,), (engine,) = start.senders(1), start.receivers(1)
    footprints = []
    for version in range(40):
        engine.call(ici.receive, publish([rank], version, "whole"))
        engine.call(ici.open_ici_receiver, {})
        if version in (15, 39):
            footprints.append((rank.call(sp.footprint), engine.call(sp.footprint)))
    for early, late in zip(*footprints, strict=True):
        assert late["fds"] <= early["fds"] + 4
        assert late["threads"] <= early["threads"] + 2
