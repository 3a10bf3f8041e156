"""Processes that are killed, files that disappear, space that runs out, bytes that change."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import sync_processes as sp
import torch

from weight_sync import (
    Shard,
    SpaceError,
    StaleHandleError,
    VerificationError,
    WeightSyncError,
    open_receiver,
    open_sender,
)
from weight_sync.shared_memory.segments import HEADER_BYTES, PAGE_BYTES


def segments(run_id: str, directory: Path = Path("/dev/shm")) -> list[Path]:
    return sorted(directory.glob(f"weight_sync.{run_id}.*"))


def publish_policy(sender, seed: int) -> dict:
    return sender.publish(seed, [Shard.whole(name, tensor) for name, tensor in sp.policy(seed).items()])


def wait_for(condition, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"


# --- killed processes ---


def state_of(path: Path) -> int:
    return int(np.fromfile(path, dtype=np.int64, count=2)[1])


def stop_in_mid_write(pid: int, run_id: str) -> Path | None:
    """Stops the process; if no segment is half-written then, it goes on."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T", "stop")
    half_written = [path for path in segments(run_id) if state_of(path) % 2]
    if len(segments(run_id)) == 2 and len(half_written) == 1:
        return half_written[0]
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.003)
    return None


def test_sender_killed_in_mid_write(engine, trainer, run_id, tmp_path):
    """What was published before can still be read, what was being written never; the next sender cleans up."""
    newest = tmp_path / "newest.json"
    trainer.call(sp.open_for, run_id, {})
    overwritten = trainer.call(sp.publish_constant, 0, 5_000_000)
    trainer.start(sp.publish_until, str(tmp_path / "never"), 5_000_000, str(newest))
    wait_for(newest.exists, "handle")
    wait_for(lambda: stop_in_mid_write(trainer.process.pid, run_id), "half-written segment")
    trainer.kill()
    handle = json.loads(newest.read_text())
    half_written = next(path for path in segments(run_id) if state_of(path) % 2)
    assert str(half_written) != handle["path"]

    weight = torch.frombuffer(bytearray(engine.call(sp.receive, handle)["weight"][2]), dtype=torch.float32)
    assert weight.unique().tolist() == [handle["version"]]
    wanted = handle | {"path": str(half_written), "sequence": handle["sequence"] + 1}
    for refused in (overwritten, wanted):
        with pytest.raises(StaleHandleError, match=r"is no longer in .* (is overwriting|has overwritten)"):
            engine.call(sp.receive, refused)

    sender = open_sender("shared_memory", run_id=run_id)
    new = publish_policy(sender, 8)
    assert len(segments(run_id)) == 2
    assert not half_written.exists()
    assert engine.call(sp.receive, new) == sp.expected(8)
    with pytest.raises(StaleHandleError, match=r"is not on host .* may have been removed since"):
        open_receiver("shared_memory").receive(handle)
    sender.close()


def test_receiver_killed_in_mid_load(engine, trainer, run_id, tmp_path):
    """``trainer`` is a process to be killed; here it is an engine."""
    sender = open_sender("shared_memory", run_id=run_id)
    trainer.call(sp.open_receiving, {})
    trainer.start(sp.receive_and_hang, publish_policy(sender, 1), str(tmp_path / "loading"))
    wait_for((tmp_path / "loading").exists, "load")
    trainer.kill()
    for version in (2, 3, 4):
        assert engine.call(sp.receive, publish_policy(sender, version)) == sp.expected(version)
    assert len(segments(run_id)) == 2
    sender.close()


def test_segment_removed_while_it_is_read_and_before(run_id):
    """Who has it mapped reads on, who has not is told; the sender makes new ones for the next version."""
    sender = open_sender("shared_memory", run_id=run_id)
    reader, late = open_receiver("shared_memory"), open_receiver("shared_memory")
    handle = publish_policy(sender, 1)
    with reader.receive(handle) as received:
        for path in segments(run_id):
            path.unlink()
        assert sp.bits(received.tensors["model.layers.0.router.counts"]) == sp.bits(
            sp.policy(1)["model.layers.0.router.counts"]
        )
    with pytest.raises(StaleHandleError, match=r"version 1: .* may have been removed since"):
        late.receive(handle)
    handle = publish_policy(sender, 2)
    assert len(segments(run_id)) == 2
    for receiver in (reader, late):
        with receiver.receive(handle) as received:
            assert {name: sp.bits(t) for name, t in received.tensors.items()} == {
                name: sp.bits(t) for name, t in sp.policy(2).items()
            }
    sender.close()


# --- too little space ---


@pytest.fixture
def small_memory(small_tmpfs):
    return small_tmpfs(16)


def test_too_small_a_place_is_told_and_enough_of_it_used(engine, run_id, small_memory):
    sender = open_sender("shared_memory", run_id=run_id, directory=small_memory)
    weight = torch.randn(2_500_000)
    need = rf"{re.escape(str(small_memory))} has 0\.02 GB free .* 2 segment\(s\) of 0\.01 GB need 0\.02 GB\. Enlarge it"
    for _ in range(2):
        with pytest.raises(SpaceError, match=need):
            sender.publish(1, [Shard.whole("weight", weight)])
        assert list(small_memory.iterdir()) == []
    handle = sender.publish(1, [Shard.whole("weight", weight[:100])])
    assert engine.call(sp.receive, handle)["weight"][2] == sp.bits(weight[:100])
    with pytest.raises(SpaceError, match=need):
        sender.publish(2, [Shard.whole("weight", weight)])
    subprocess.run(["mount", "-o", "remount,size=64m", small_memory], check=True, timeout=30)
    handle = sender.publish(3, [Shard.whole("weight", weight)])
    assert handle["path"].startswith(f"{small_memory}/")
    assert engine.call(sp.receive, handle)["weight"][2] == sp.bits(weight)
    sender.close()
    assert list(small_memory.iterdir()) == []


def test_space_that_another_took_in_the_meantime(run_id, small_memory, monkeypatch):
    """The file system refuses the second segment, after the look at the free space."""
    monkeypatch.setattr("weight_sync.shared_memory.sender.require_space", lambda *_: None)
    sender = open_sender("shared_memory", run_id=run_id, directory=small_memory)
    with pytest.raises(SpaceError, match=r"could not give 0\.01 GB: No space left"):
        sender.publish(1, [Shard.whole("weight", torch.zeros(2_500_000))])
    assert list(small_memory.iterdir()) == []
    sender.publish(1, [Shard.whole("weight", torch.zeros(100_000))])
    sender.close()


# --- changed bytes ---


def flip(path: str, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x80]))


@pytest.fixture(scope="module")
def published():
    sender = open_sender("shared_memory", run_id=f"test-{secrets.token_hex(4)}")
    yield sender, publish_policy(sender, 1)
    sender.close()


@pytest.mark.parametrize("fresh", [True, False], ids=["a new receiver", "a receiver that has it mapped"])
def test_a_byte_flipped_in_a_tensor_names_it(published, fresh):
    sender, handle = published
    receiver = open_receiver("shared_memory")
    receiver.receive(handle).check()
    for entry in sender.manifest.tensors:
        for byte in {0, entry.nbytes // 2, entry.nbytes - 1} if entry.nbytes else ():
            position = HEADER_BYTES + entry.offset + byte
            flip(handle["path"], position)
            with pytest.raises(VerificationError, match=re.escape(entry.name)) as caught:
                (open_receiver("shared_memory") if fresh else receiver).receive(handle)
            assert caught.value.tensors == [entry.name]
            flip(handle["path"], position)
    receiver.receive(handle).check()


def test_a_byte_flipped_in_the_manifest_is_refused(published):
    _, handle = published
    receiver = open_receiver("shared_memory")
    for byte in range(0, handle["manifest_bytes"], 97):
        position = HEADER_BYTES + handle["manifest_offset"] + byte
        flip(handle["path"], position)
        with pytest.raises(WeightSyncError, match=r"version 1: the manifest in .* is damaged"):
            receiver.receive(handle)
        flip(handle["path"], position)
    receiver.receive(handle).check()


@pytest.mark.parametrize("fresh", [True, False], ids=["a new receiver", "a receiver that has it mapped"])
def test_a_byte_flipped_in_the_header_is_refused_and_the_next_version_is_fine(engine, run_id, fresh):
    sender, receiver = open_sender("shared_memory", run_id=run_id, slots=1), open_receiver("shared_memory")
    for version, byte in enumerate(range(16)):  # all that the header uses
        handle = publish_policy(sender, version)
        receiver.receive(handle).check()
        flip(handle["path"], byte)
        with pytest.raises(WeightSyncError, match=r"no weight segment, or its header is damaged|is no longer in"):
            (open_receiver("shared_memory") if fresh else receiver).receive(handle)
    handle = publish_policy(sender, 99)
    assert engine.call(sp.receive, handle) == sp.expected(99)
    receiver.receive(handle).check()
    sender.close()


def test_ranks_of_one_engine_share_the_verification(published):
    """Every changed byte is found by exactly one of them."""
    sender, handle = published
    receivers = [open_receiver("shared_memory", share=(index, 3)) for index in range(3)]
    for entry in sender.manifest.tensors:
        if entry.nbytes:
            flip(handle["path"], HEADER_BYTES + entry.offset)
            refused = []
            for receiver in receivers:
                try:
                    receiver.receive(handle)
                except VerificationError as error:
                    refused.append(error.tensors)
            assert refused == [[entry.name]]
            flip(handle["path"], HEADER_BYTES + entry.offset)
    for receiver in receivers:
        assert len(receiver.receive(handle).tensors) == len(sender.manifest.tensors)


def test_only_pages_that_were_written_to_are_dropped(run_id):
    """A page fault for every page of every version would cost more than the copy."""
    sender, receiver = (
        open_sender("shared_memory", run_id=run_id, hashes=False, slots=1),
        open_receiver("shared_memory", verify=False),
    )
    numel = 1_000_000

    def receive(version: int) -> torch.Tensor:
        return receiver.receive(sender.publish(version, [Shard.whole("w", torch.full((numel,), version))])).tensors["w"]

    def resident_pages(weight: torch.Tensor) -> int:
        first = weight.data_ptr() // PAGE_BYTES
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * 8)
            return int((np.frombuffer(pagemap.read(weight.nbytes // PAGE_BYTES * 8), dtype=np.uint64) >> 63).sum())

    weight = receive(1)
    assert weight.unique().tolist() == [1]
    touched = resident_pages(weight)
    assert touched > weight.nbytes // PAGE_BYTES // 2
    weight = receive(2)
    assert resident_pages(weight) == touched
    weight[numel // 2] = 7
    weight = receive(3)
    assert weight.unique().tolist() == [3]
    sender.close()


# --- hashes made ahead ---


def test_hashes_made_ahead_are_those_of_the_bytes(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    shards = [Shard.whole(name, tensor) for name, tensor in sp.policy(5).items()]
    shards.append(Shard.whole("converted", torch.randn(20, 3), dtype=torch.bfloat16))  # cannot be hashed ahead
    shards.append(Shard.whole("transposed", torch.randn(20, 3).t()))
    sender.publish(4, shards)
    without = {entry.name: entry.xxh3_128 for entry in sender.manifest.tensors}
    sender.hash_ahead(shards)
    receiver.receive(sender.publish(5, shards)).check()
    assert {entry.name: entry.xxh3_128 for entry in sender.manifest.tensors} == without
    sender.close()


def test_a_tensor_that_changed_since_it_was_hashed_is_refused_once(run_id):
    sender, receiver = open_sender("shared_memory", run_id=run_id), open_receiver("shared_memory")
    shards = [Shard.whole(name, torch.ones(1000)) for name in ("kept", "changed")]
    sender.hash_ahead(shards)
    shards[1].data[7] = 2
    with pytest.raises(VerificationError) as caught:
        receiver.receive(sender.publish(1, shards))
    assert caught.value.tensors == ["changed"]
    receiver.receive(sender.publish(2, shards)).check()
    sender.close()
