"""Weights through a real object-store server on loopback (moto speaks S3), with the client that talks to the real one."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time

import disk_processes as dp
import pytest
import s3fs
from remote_processes import Remote, on_all, start_ranks
from test_disk import SMALL, publish, receive

from weight_sync import StaleHandleError, VerificationError, WeightSyncError, open_receiver, open_sender
from weight_sync.disk import latest
from weight_sync.disk.storage import open_store

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server():
    """Storage options for the server, which is a process of its own and ends with this one."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    options = {"endpoint_url": f"http://127.0.0.1:{process.stdout.readline().strip()}", "key": "any", "secret": "any"}
    s3fs.S3FileSystem(**options).mkdir("policies")
    yield options
    process.stdin.close()
    process.wait(30)


@pytest.fixture
def bucket(server):
    return {"url": f"s3://policies/{secrets.token_hex(4)}", "storage_options": server}


@pytest.fixture(scope="module")
def s3_ranks(tmp_path_factory):
    ranks = start_ranks(2, tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    for rank in ranks:
        rank.kill()


@pytest.fixture(scope="module")
def s3_engine():
    remote = Remote()
    yield remote
    remote.kill()


def objects(bucket: dict) -> list[str]:
    filesystem = s3fs.S3FileSystem(**bucket["storage_options"], skip_instance_cache=True)
    root = bucket["url"].removeprefix("s3://")
    return sorted(path.removeprefix(root + "/") for path in filesystem.find(root))


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_two_ranks_and_an_engine_meet_in_a_bucket(s3_ranks, s3_engine, bucket, transport):
    s3_engine.call(dp.open_disk_receiver, transport, {})
    on_all(s3_ranks, dp.open_disk, transport, bucket | SMALL | ({"full_every": 3} if transport == "disk_delta" else {}))
    wire = []
    for version in range(5):
        handle = on_all(s3_ranks, dp.publish_step, version)[0]
        tensors, stats = s3_engine.call(dp.receive_disk, handle)
        assert tensors == dp.wire(dp.steps(version))
        wire.append(stats["wire_bytes"])
    assert latest(**bucket) == handle
    if transport == "disk_delta":
        assert max(wire[1], wire[2], wire[4]) < min(wire[0], wire[3])
    kept = {name.split("/")[0] for name in objects(bucket)}
    assert kept == {"latest", *(("v00000003", "v00000004" + ".delta" * (transport == "disk_delta")))}
    # an engine that joins now
    assert receive(open_receiver(transport), handle) == dp.wire(dp.steps(4))


def test_what_has_no_commit_file_does_not_exist(s3_ranks, server, bucket):
    """A rank is killed in mid-write. The data is there, the version is not; the next start removes it."""
    trainer = Remote()
    trainer.call(dp.open_disk, "disk", bucket | SMALL)
    whole = trainer.call(dp.publish_step, 1)
    trainer.start(dp.publish_and_die_before_commit, 2)
    trainer.process.join(60)
    trainer.kill()
    assert any(name.startswith("v00000002/model-") for name in objects(bucket))
    assert latest(**bucket) == whole
    assert open_store(**bucket).directories() == ["v00000001"]
    sender = open_sender("disk", run_id="test", **bucket)
    handle = publish(sender, 3)
    assert not any(name.startswith("v00000002") for name in objects(bucket))
    assert receive(open_receiver("disk"), handle) == dp.wire(dp.steps(3))


def test_large_tensors_travel_in_parts(bucket, monkeypatch):
    """Parts of 6 MB instead of 64: uploads in several parts, reads of several ranges."""
    from weight_sync.disk import receiver as disk_receiver
    from weight_sync.disk.storage import objects

    monkeypatch.setattr(objects, "REQUEST_BYTES", 6 * 2**20)
    monkeypatch.setattr(disk_receiver, "REQUEST_BYTES", 6 * 2**20)
    state = {}
    dp.open_disk(state, "disk", bucket)
    handle = dp.publish_noise(state, 1, 20_000_001)
    received = open_receiver("disk").receive(handle)
    assert received.stats["wire_bytes"] == 20_000_001


def test_an_abandoned_file_is_not_there(server, bucket):
    store = open_store(**bucket)
    writer = store.create("v00000001", "model")
    for _ in range(3):
        writer.write(bytes(30 * 2**20))
    writer.abandon()
    del writer
    assert objects(bucket) == []
    client = s3fs.S3FileSystem(**server)
    uploads = client.call_s3("list_multipart_uploads", Bucket="policies")
    assert not uploads.get("Uploads")


def test_damage_and_removal(server, bucket):
    sender, receiver = open_sender("disk_delta", run_id="test", **bucket), open_receiver("disk_delta")
    receive(receiver, publish(sender, 0))
    handle = publish(sender, 1)
    filesystem = s3fs.S3FileSystem(**server)
    path = f"{bucket['url']}/{handle['directory']}/delta-00001-of-00001.zst"
    data = bytearray(filesystem.cat_file(path))
    data[len(data) // 2] ^= 1
    filesystem.pipe_file(path, bytes(data))
    with pytest.raises(VerificationError, match="version 1"):
        receiver.receive(handle)
    assert receive(receiver, publish(sender, 1, whole=True)) == dp.wire(dp.steps(1))
    publish(sender, 2, whole=True), publish(sender, 3, whole=True)
    with pytest.raises(StaleHandleError, match="not at s3"):
        receiver.receive(handle)


def test_a_server_that_does_not_answer_has_a_deadline(bucket):
    handle = publish(open_sender("disk", run_id="test", **bucket), 1)

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        endpoint = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match="no answer within 2 s"):
            open_receiver("disk", storage_options=endpoint, timeout_s=2).receive(handle)
        sender = open_sender(
            "disk", run_id="test", url=bucket["url"], storage_options=bucket["storage_options"] | endpoint, timeout_s=2
        )
        with pytest.raises(WeightSyncError, match="no answer within 2 s"):
            publish(sender, 2)
        assert time.monotonic() - start < 60


def test_no_bucket(server):
    sender = open_sender("disk", run_id="test", url="s3://nobodys/weights", storage_options=server)
    with pytest.raises(WeightSyncError, match="nobodys"):
        publish(sender, 1)
