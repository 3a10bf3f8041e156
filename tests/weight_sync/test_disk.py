"""Versions in storage: what is written, who can read it, and what stays."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import disk_processes as dp
import fsspec
import pytest
import sync_processes as sp
import torch
from remote_processes import on_all
from safetensors import safe_open
from tiny_qwen3 import tiny_config

from weight_sync import Manifest, Shard, StaleHandleError, WeightSyncError, open_receiver, open_sender
from weight_sync.disk import latest

SMALL = {"file_bytes": 9000, "bucket_bytes": 3000}
"""Several files and rounds for the small policy of the tests."""


@pytest.fixture(params=["path", "file", "memory"])
def url(request, tmp_path):
    return {"path": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{secrets.token_hex(4)}"}[
        request.param
    ]


def publish(sender, version: int, **options) -> dict:
    return sender.publish(version, sp.shards_of(dp.steps(version), 0, 1, "rows"), **options)


def receive(receiver, handle) -> dict:
    with receiver.receive(handle) as received:
        assert received.version == handle["version"]
        return dp.wire(received.tensors)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- bytes arrive ---


@pytest.mark.parametrize(("transport", "full_every"), [("disk", 1), ("disk_delta", 3)])
def test_one_rank_at_any_url(url, transport, full_every):
    sender = open_sender(transport, run_id="test", url=url, full_every=full_every, **SMALL)
    receiver = open_receiver(transport)
    kinds = []
    for version in range(7):
        handle = publish(sender, version)
        assert handle == json.loads(json.dumps(handle))
        assert receive(receiver, handle) == dp.wire(dp.steps(version))
        kinds.append(handle["kind"])
    assert kinds == [("full" if version % full_every == 0 else "delta") for version in range(7)]
    assert latest(url) == handle
    sender.close()
    assert receive(open_receiver(transport), handle) == dp.wire(dp.steps(6))


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_two_ranks_write_in_parallel(engine, ranks, tmp_path, transport):
    engine.call(dp.open_disk_receiver, transport, {})
    on_all(ranks, dp.open_disk, transport, {"url": str(tmp_path), **SMALL})
    for version, how in enumerate(["rows", "rows", "columns", "uneven", "uneven"]):
        handles = on_all(ranks, dp.publish_step, version, how)
        assert handles[0] == handles[1]
        tensors, _ = engine.call(dp.receive_disk, handles[0])
        assert tensors == dp.wire(dp.steps(version))
    # another way to cut the tensors has other owners, and starts anew
    kinds = {"v00000000": 0, "v00000001": 1, "v00000002": 0, "v00000003": 0, "v00000004": 1}
    delta = transport == "disk_delta"
    kept = list(kinds)[-2:]
    assert names(tmp_path) == ["latest", *(n + ".delta" * (delta and kinds[n]) for n in kept)]


def test_a_whole_version_that_one_rank_asks_for(ranks, tmp_path):
    on_all(ranks, dp.open_disk, "disk_delta", {"url": str(tmp_path)})
    on_all(ranks, dp.publish_step, 0)
    for rank, whole in enumerate([False, True]):
        ranks[rank].start(dp.publish_step, 1, "rows", whole)
    assert [rank.finish(60)["kind"] for rank in ranks] == ["full", "full"]
    handle = on_all(ranks, dp.publish_step, 2)[0]
    assert handle["kind"] == "delta"
    assert receive(open_receiver("disk_delta"), handle) == dp.wire(dp.steps(2))


def test_the_ranks_share_the_work(ranks, tmp_path):
    on_all(ranks, dp.open_disk, "disk", {"url": str(tmp_path)})
    on_all(ranks, dp.publish_step, 0)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "v00000000").glob("*.safetensors"))]
    assert len(sizes) == 2
    assert min(sizes) > max(sizes) / 4  # one of the nine tensors is three quarters of it all


def test_parameters_are_converted_on_the_way(url):
    master = torch.nn.Parameter(torch.randn(40, 30))
    sender = open_sender("disk", run_id="test", url=url)
    handle = sender.publish(1, [Shard.whole("w", master.t(), dtype=torch.bfloat16)])
    assert torch.equal(open_receiver("disk").receive(handle).tensors["w"], master.detach().t().bfloat16())


def test_without_hashes_only_an_unverifying_receiver_takes_it(tmp_path):
    sender = open_sender("disk", run_id="test", url=str(tmp_path), hashes=False)
    handle = publish(sender, 1)
    with pytest.raises(WeightSyncError, match="without hashes"):
        open_receiver("disk").receive(handle)
    assert receive(open_receiver("disk", verify=False), handle) == dp.wire(dp.steps(1))


# --- a version is a checkpoint ---


def test_transformers_loads_a_version_written_by_two_ranks(ranks, tmp_path, byte_tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(len(byte_tokenizer), tied=False))
    start = tmp_path / "start"
    model.save_pretrained(start)
    byte_tokenizer.save_pretrained(start)
    (start / "notes").mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}

    url = tmp_path / "weights"
    on_all(ranks, dp.open_disk, "disk", {"url": str(url), "model_dir": str(start), "file_bytes": 60_000})
    handle = on_all(ranks, dp.publish_tensors, 7, {name: t.float() for name, t in tensors.items()}, torch.bfloat16)[0]
    directory = url / handle["directory"]
    assert names(directory) == sorted(
        {name for name in names(start) if "safetensors" not in name and name != "notes"}
        | {f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)}
        | {"model.safetensors.index.json", "weight_sync.json"}
    )
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    assert dp.wire(dict(loaded.state_dict())) == dp.wire(tensors)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == byte_tokenizer.chat_template
    assert tokenizer("What is 2 + 3?") == byte_tokenizer("What is 2 + 3?")


def test_the_safetensors_library_reads_every_dtype(tmp_path):
    sender = open_sender("disk", run_id="test", url=str(tmp_path), **SMALL)
    directory = tmp_path / publish(sender, 3)["directory"]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert index["weight_map"][name] == path.name
                tensors[name] = file.get_tensor(name)
    assert dp.wire(tensors) == dp.wire(dp.steps(3))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_a_model_directory_that_is_none_is_named(tmp_path):
    for wrong in ["missing", "empty"]:
        (tmp_path / "empty").mkdir(exist_ok=True)
        sender = open_sender("disk", run_id="test", url=str(tmp_path / "w"), model_dir=str(tmp_path / wrong))
        with pytest.raises(WeightSyncError, match=f"option model_dir .*{wrong}"):
            publish(sender, 1)
        assert not (tmp_path / "w").exists()


# --- what stays ---


def test_retention_keeps_what_deltas_build_on(tmp_path):
    sender = open_sender("disk_delta", run_id="test", url=str(tmp_path), full_every=4, keep=2)
    seen = []
    for version in range(6):
        publish(sender, version)
        seen.append([name for name in names(tmp_path) if name != "latest"])
    v = [f"v{number:08d}" + (".delta" if number % 4 else "") for number in range(6)]
    assert seen == [v[:1], v[:2], v[:3], v[:4], v[:5], v[4:6]]


def test_a_version_published_again_is_another_directory(url):
    sender, receiver = open_sender("disk_delta", run_id="test", url=url, keep=3), open_receiver("disk_delta")
    handles = [publish(sender, 0), publish(sender, 1), publish(sender, 1, whole=True), publish(sender, 1, whole=True)]
    assert [handle["directory"] for handle in handles[1:]] == ["v00000001.delta", "v00000001-2", "v00000001-3"]
    assert [handle["kind"] for handle in handles[1:]] == ["delta", "full", "full"]
    for handle in handles[1:]:
        assert receive(receiver, handle) == dp.wire(dp.steps(1))


def test_a_run_that_goes_back_keeps_its_newest(url):
    """Resumed from an older checkpoint: version 2 comes after version 5 of the time before."""
    sender = open_sender("disk", run_id="test", url=url)
    publish(sender, 4), publish(sender, 5)
    sender.close()
    resumed = open_sender("disk", run_id="test", url=url)
    old, new = latest(url), publish(resumed, 2)
    assert receive(open_receiver("disk"), old) == dp.wire(dp.steps(5))
    assert receive(open_receiver("disk"), new) == dp.wire(dp.steps(2))
    newest = publish(resumed, 3)
    assert latest(url) == newest
    with pytest.raises(StaleHandleError, match="v00000005"):
        open_receiver("disk").receive(old)


def test_what_others_put_beside_the_versions_is_left_alone(url):
    filesystem, root = fsspec.core.url_to_fs(url)
    theirs = [f"{root}/{name}/file" for name in ("checkpoints", "v1", ".cache.writing", "version00000001")]
    for path in theirs:
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(path, b"theirs")
    sender = open_sender("disk", run_id="test", url=url, keep=1)
    publish(sender, 1), publish(sender, 2)
    assert [filesystem.cat_file(path) for path in theirs] == [b"theirs"] * 4
    assert filesystem.exists(f"{root}/v00000002") > filesystem.exists(f"{root}/v00000001")


def test_no_version_yet(url):
    assert latest(url) is None


# --- deltas at the receiver ---


def test_a_receiver_that_missed_versions_replays_them_from_its_own(tmp_path):
    sender = open_sender("disk_delta", run_id="test", url=str(tmp_path), full_every=10, **SMALL)
    faithful, late = open_receiver("disk_delta"), open_receiver("disk_delta")
    receive(faithful, publish(sender, 0))
    publish(sender, 1), publish(sender, 2)
    handle = publish(sender, 3)
    read = {}
    for name, receiver in (("own base", faithful), ("full base", late)):
        with receiver.receive(handle) as received:
            assert dp.wire(received.tensors) == dp.wire(dp.steps(3))
            read[name] = received.stats["wire_bytes"]
            assert received.stats["from_base"] == (receiver is faithful)
    assert 0 < read["own base"] < sender.manifest.total_bytes < read["full base"]


def test_unchanged_tensors_do_not_travel(tmp_path):
    sender = open_sender("disk_delta", run_id="test", url=str(tmp_path))
    publish(sender, 0)
    before = sender.manifest
    handle = sender.publish(1, sp.shards_of(dp.steps(0), 0, 1, "rows"))
    assert handle["kind"] == "delta"
    assert sender.stats["wire_bytes"] == 0
    assert before.diff(sender.manifest).changed == []
    publish(sender, 2)
    record = json.loads((tmp_path / "v00000002.delta" / "weight_sync.json").read_text())
    changed = {name for file in record["files"].values() for name in file["tensors"]}
    before, after = dp.wire(dp.steps(0)), dp.wire(dp.steps(2))
    assert changed == {name for name in before if before[name] != after[name]}
    assert dp.FROZEN not in changed


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_tensors_handed_out_never_change(url, transport):
    sender = open_sender(transport, run_id="test", url=url, full_every=3)
    receiver = open_receiver(transport)
    received = []
    for version in range(7):
        received.append(receiver.receive(publish(sender, version)))
        for kept in received:
            kept.check()
            assert dp.wire(kept.tensors) == dp.wire(dp.steps(kept.version))


def test_memory_of_versions_let_go_of_is_used_again(tmp_path):
    sender = open_sender("disk_delta", run_id="test", url=str(tmp_path), full_every=5)
    receiver = open_receiver("disk_delta")
    places = set()
    for version in range(12):
        weight = torch.full((50_000,), float(version))
        with receiver.receive(sender.publish(version, [Shard.whole("w", weight)])) as received:
            assert torch.equal(received.tensors["w"], weight)
            places.add(received.tensors["w"].data_ptr())
    assert len(places) <= 3


@pytest.mark.parametrize("name", [dp.FROZEN, "model.layers.0.mlp.up_proj.weight"])
def test_a_loader_that_modifies_tensors_in_place_harms_nobody(tmp_path, name):
    """What it spoils is the base of the next delta: the receiver sees that and reads the full version again."""
    sender, receiver = open_sender("disk_delta", run_id="test", url=str(tmp_path)), open_receiver("disk_delta")
    for version in range(4):
        with receiver.receive(publish(sender, version)) as received:
            assert dp.wire(received.tensors) == dp.wire(dp.steps(version))
            assert received.stats["from_base"] == 0
            received.tensors[name] += 1


def test_another_policy_starts_with_a_full_version(tmp_path):
    sender, receiver = open_sender("disk_delta", run_id="test", url=str(tmp_path)), open_receiver("disk_delta")
    for version, tensors in enumerate([{"a": torch.zeros(4)}, {"a": torch.ones(4)}, {"a": torch.ones(5)}]):
        handle = sender.publish(version, [Shard.whole(name, t) for name, t in tensors.items()])
        assert handle["kind"] == ("delta" if version == 1 else "full")
        assert receive(receiver, handle) == dp.wire(tensors)


def test_the_manifest_is_that_of_the_final_bytes(tmp_path):
    delta, full = (open_sender("disk_delta", run_id="test", url=str(tmp_path / str(n)), full_every=n) for n in (9, 1))
    for version in range(3):
        publish(delta, version), publish(full, version)
    assert isinstance(delta.manifest, Manifest)
    assert delta.manifest == full.manifest


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_many_syncs_stay_flat(engine, worker, tmp_path, transport):
    """Memory, files, threads of both ends and the storage. What the allocator keeps goes up and down by some 15 MB without
    growing, so the least of ten syncs is compared with the least of the ten after them: a version kept at every other sync
    would show."""
    worker.call(dp.open_disk, transport, {"url": str(tmp_path), "fsync": False, "full_every": 4})
    engine.call(dp.open_disk_receiver, transport, {})
    seen = []
    for version in range(24):
        engine.call(dp.receive_disk_only, worker.call(dp.publish_noise, version, 4_000_000))
        stored = sum(path.stat().st_size for path in tmp_path.rglob("*"))
        seen.append([remote.call(sp.footprint) | {"stored": stored} for remote in (worker, engine)])
    for of_remote in zip(*seen, strict=True):
        earlier, later = of_remote[4:14], of_remote[14:]
        assert min(f["rss_bytes"] for f in later) < min(f["rss_bytes"] for f in earlier) + 16_000_000
        assert max(f["stored"] for f in later) < max(f["stored"] for f in earlier) + 100_000
        for key in ("fds", "threads"):
            assert max(f[key] for f in later) <= max(f[key] for f in earlier)


def test_one_sender_at_a_time_writes_to_a_place(tmp_path, worker):
    """The second is told, the first goes on; where the first has closed or died the second may write."""
    mine = open_sender("disk", run_id="first", url=str(tmp_path), fsync=False)
    mine.publish(1, [Shard.whole("w", torch.zeros(4))])
    worker.call(dp.open_disk, "disk", {"url": str(tmp_path), "fsync": False})
    with pytest.raises(WeightSyncError, match=f"another sender writes to {tmp_path}: give every run a place"):
        worker.call(dp.publish_noise, 2, 1000)
    mine.publish(2, [Shard.whole("w", torch.ones(4))])
    mine.close()
    assert worker.call(dp.publish_noise, 3, 1000)["version"] == 3
