"""Processes are killed, disks fill up, bytes flip: nothing half-written is served, nobody hangs, the next sync works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import disk_processes as dp
import pytest
from remote_processes import Remote, on_all, start_ranks
from test_disk import SMALL, names, publish, receive

from weight_sync import (
    SpaceError,
    StaleHandleError,
    VerificationError,
    WeightSyncError,
    open_receiver,
    open_sender,
)
from weight_sync.disk import latest
from weight_sync.disk.versions import Record


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x80]))


def place(directory: Path, name: str) -> tuple[Path, int, int]:
    """In which file a tensor is, and where in it."""
    record = Record.from_json((directory / "weight_sync.json").read_bytes())
    return next((directory / file, *of.tensors[name]) for file, of in record.files.items() if name in of.tensors)


def errors_of_all(ranks: list[Remote], function, *args) -> list[Exception]:
    for rank in ranks:
        rank.start(function, *args)
    errors = []
    for rank in ranks:
        with pytest.raises(WeightSyncError) as caught:
            rank.finish(120)
        errors.append(caught.value)
    return errors


# --- one flipped byte ---


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.router.bias"])
def test_a_flipped_byte_of_a_full_version_is_refused_by_name(tmp_path, name, where):
    sender, receiver = open_sender("disk", run_id="test", url=str(tmp_path), **SMALL), open_receiver("disk")
    handle = publish(sender, 1)
    path, offset, nbytes = place(tmp_path / handle["directory"], name)
    flip(path, offset + (nbytes - 1 if where == "last" else 0))
    with pytest.raises(VerificationError, match=name) as caught:
        receiver.receive(handle)
    assert caught.value.tensors == [name]
    assert receive(receiver, publish(sender, 2)) == dp.wire(dp.steps(2))


def test_a_flipped_byte_of_a_safetensors_header_is_refused(tmp_path):
    """Engines that load the checkpoint themselves trust it."""
    sender, receiver = open_sender("disk", run_id="test", url=str(tmp_path)), open_receiver("disk")
    handle = publish(sender, 1)
    path, _, _ = place(tmp_path / handle["directory"], dp.FROZEN)
    flip(path, path.read_bytes().index(b"BF16"))
    with pytest.raises(VerificationError) as caught:
        receiver.receive(handle)
    assert "model.embed_tokens.weight" in caught.value.tensors
    assert receive(receiver, publish(sender, 1)) == dp.wire(dp.steps(1))


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_a_file_cut_short_is_refused_by_name(tmp_path, transport):
    sender, receiver = open_sender(transport, run_id="test", url=str(tmp_path)), open_receiver(transport)
    handle = publish(sender, 1)
    path, offset, _ = place(tmp_path / handle["directory"], "model.layers.0.router.bias")
    with open(path, "r+b") as file:
        file.truncate(offset + 1)
    with pytest.raises(VerificationError, match=r"model.layers.0.router.bias"):
        receiver.receive(handle)


@pytest.mark.parametrize("byte", ["first", "middle", "last"])
def test_a_flipped_byte_of_a_manifest_is_refused(tmp_path, byte):
    sender, receiver = open_sender("disk_delta", run_id="test", url=str(tmp_path)), open_receiver("disk_delta")
    for version, whole in ((0, False), (1, False), (2, True)):
        handle = publish(sender, version, whole=whole)
        path = tmp_path / handle["directory"] / "weight_sync.json"
        size = path.stat().st_size
        flip(path, {"first": 0, "middle": size // 2, "last": size - 1}[byte])
        with pytest.raises(WeightSyncError, match=rf"{handle['directory']}/weight_sync.json is damaged"):
            receiver.receive(handle)
    assert receive(receiver, publish(sender, 3, whole=True)) == dp.wire(dp.steps(3))


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def chain(tmp_path):
    """A sender after versions 0 (full), 1 and 2, and a receiver that has version 1."""
    sender, receiver = open_sender("disk_delta", run_id="test", url=str(tmp_path), **SMALL), open_receiver("disk_delta")
    publish(sender, 0)
    receive(receiver, publish(sender, 1))
    return sender, receiver, publish(sender, 2)


def test_an_own_base_that_is_wrong_is_replaced_from_the_full_version(chain):
    sender, receiver, handle = chain
    receiver._base.tensors[NAME][7] ^= 1
    with receiver.receive(handle) as received:
        assert dp.wire(received.tensors) == dp.wire(dp.steps(2))
        assert received.stats["from_base"] == 0
    with receiver.receive(publish(sender, 3)) as received:
        assert dp.wire(received.tensors) == dp.wire(dp.steps(3))
        assert received.stats["from_base"] == 1


@pytest.mark.parametrize("position", [0, 5, -2])
def test_a_flipped_byte_of_a_delta_is_refused_by_name_until_the_next_full_version(tmp_path, chain, position):
    sender, receiver, handle = chain
    path, offset, nbytes = place(tmp_path / handle["directory"], NAME)
    flip(path, offset + position % nbytes)
    for _ in range(2):
        with pytest.raises(VerificationError, match=NAME):
            receiver.receive(handle)
    with pytest.raises(VerificationError, match=NAME):  # it builds on what is damaged
        receiver.receive(publish(sender, 3))
    assert receive(receiver, publish(sender, 3, whole=True)) == dp.wire(dp.steps(3))
    assert receive(receiver, publish(sender, 4)) == dp.wire(dp.steps(4))


def test_a_damaged_full_version_does_not_matter_to_who_has_it(tmp_path, chain):
    sender, receiver, handle = chain
    path, offset, _ = place(tmp_path / "v00000000", NAME)
    flip(path, offset)
    assert receive(receiver, handle) == dp.wire(dp.steps(2))
    late = open_receiver("disk_delta")
    with pytest.raises(VerificationError, match=NAME):
        late.receive(handle)
    for either in (receiver, late):
        assert receive(either, publish(sender, 3, whole=True)) == dp.wire(dp.steps(3))


def test_a_removed_version_is_stale(tmp_path, chain):
    sender, receiver, handle = chain
    for version in range(3, 6):
        publish(sender, version, whole=True)
    with pytest.raises(StaleHandleError, match=r"v00000002\.delta"):
        receiver.receive(handle)
    with pytest.raises(StaleHandleError, match="nowhere"):
        receiver.receive(handle | {"url": str(tmp_path / "nowhere")})


# --- killed processes ---


@pytest.fixture
def two_ranks(tmp_path_factory):
    ranks = start_ranks(2, tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    for rank in ranks:
        rank.kill()


@pytest.mark.parametrize(("transport", "dies"), [("disk", 0), ("disk", 1), ("disk_delta", 1)])
def test_a_rank_killed_in_mid_write_leaves_nothing_that_is_served(tmp_path, two_ranks, transport, dies):
    receiver = open_receiver(transport)
    on_all(two_ranks, dp.open_disk, transport, {"url": str(tmp_path), **SMALL})
    on_all(two_ranks, dp.publish_step, 0)
    whole = on_all(two_ranks, dp.publish_step, 1)[0]

    for rank in two_ranks:
        rank.start(dp.publish_and_die_at, 2, dies, 1)
    with pytest.raises(WeightSyncError, match="lost"):
        two_ranks[1 - dies].finish(120)
    two_ranks[dies].process.join(60)
    assert latest(str(tmp_path)) == whole
    assert not any(name.startswith("v00000002") for name in names(tmp_path))
    assert receive(receiver, whole) == dp.wire(dp.steps(1))

    sender = open_sender(transport, run_id="test", url=str(tmp_path))
    assert receive(receiver, publish(sender, 2)) == dp.wire(dp.steps(2))
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path, trainer):
    trainer.call(dp.open_disk, "disk", {"url": str(tmp_path), **SMALL})
    whole = trainer.call(dp.publish_step, 1)
    trainer.start(dp.publish_and_die_at, 2, 0, 2)
    trainer.process.join(60)
    assert ".v00000002.writing" in names(tmp_path)
    assert latest(str(tmp_path)) == whole
    publish(open_sender("disk", run_id="test", url=str(tmp_path)), 2)
    assert names(tmp_path) == ["latest", "v00000001", "v00000002"]


def test_a_receiver_killed_in_mid_load_disturbs_nobody(tmp_path, trainer):
    sender = open_sender("disk_delta", run_id="test", url=str(tmp_path))
    trainer.call(dp.open_disk_receiver, "disk_delta", {"threads": 1})
    trainer.call(dp.receive_disk, publish(sender, 0))
    handle = publish(sender, 1)
    trainer.start(dp.receive_and_die, handle)
    trainer.process.join(60)
    assert trainer.process.exitcode == -9
    assert receive(open_receiver("disk_delta"), handle) == dp.wire(dp.steps(1))
    assert receive(open_receiver("disk_delta"), publish(sender, 2)) == dp.wire(dp.steps(2))


# --- a full disk ---


@pytest.fixture
def small_disk(small_tmpfs):
    return small_tmpfs(8)


def test_a_version_that_does_not_fit_is_refused_before_it_is_written(small_disk, engine, ranks):
    engine.call(dp.open_disk_receiver, "disk", {})
    on_all(ranks, dp.open_disk, "disk", {"url": str(small_disk), "keep": 1})
    old = on_all(ranks, dp.publish_noise, 1, 3_000_000)[0]
    for error in errors_of_all(ranks, dp.publish_noise, 2, 6_000_000):
        assert isinstance(error, SpaceError)
        assert "has 0.00" in str(error)
        assert "needs 0.007 GB" in str(error)
    assert names(small_disk) == ["latest", "v00000001"]
    engine.call(dp.receive_disk, old)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    new = on_all(ranks, dp.publish_noise, 2, 6_000_000)[0]
    engine.call(dp.receive_disk, new)


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_a_disk_that_fills_up_in_mid_write(small_disk, engine, ranks, transport):
    """What is there stays; once there is room the next version is written whole."""
    engine.call(dp.open_disk_receiver, transport, {})
    on_all(ranks, dp.open_disk, transport, {"url": str(small_disk), "keep": 1, "bucket_bytes": 2**20})
    old = on_all(ranks, dp.publish_noise, 1, 3_000_000)[0]
    filler = small_disk / "filler"
    if transport == "disk":  # the free space is looked at first, so it goes afterwards
        ranks[0].call(dp.fill_after_check, str(filler), 4_000_000)
    else:
        filler.write_bytes(bytes(4_000_000))
    for error in errors_of_all(ranks, dp.publish_noise, 2, 3_000_000):
        assert isinstance(error, SpaceError)
        assert "no space left" in str(error)
    assert [name for name in names(small_disk) if name != "filler"] == ["latest", "v00000001"]
    assert latest(str(small_disk)) == old
    engine.call(dp.receive_disk, old)
    filler.unlink()
    new = on_all(ranks, dp.publish_noise, 2, 3_000_000)[0]
    assert new["kind"] == "full"
    engine.call(dp.receive_disk, new)


# --- ranks that cannot work together ---


def test_ranks_that_do_not_see_the_same_path(tmp_path, ranks):
    for number, rank in enumerate(ranks):
        rank.start(dp.open_disk, "disk", {"url": str(tmp_path / str(number))})
    for rank in ranks:
        rank.finish()
    for error in errors_of_all(ranks, dp.publish_step, 1):
        assert "all ranks must see the same path" in str(error)


def test_a_url_that_nothing_opens():
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        open_sender("disk", run_id="test", url="nosuch://place")
