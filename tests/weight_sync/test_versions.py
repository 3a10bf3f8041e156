"""Which versions of a place may go."""

from __future__ import annotations

import shutil

import pytest
import torch

from weight_sync import Shard, open_receiver, open_sender


@pytest.mark.parametrize("transport", ["disk", "disk_delta"])
def test_versions_that_somebody_else_removed_do_not_stop_the_sender(tmp_path, transport):
    sender = open_sender(transport, run_id="test", url=str(tmp_path), keep=1, full_every=2)
    receiver = open_receiver(transport)
    for version in range(1, 6):
        handle = sender.publish(version, [Shard.whole("w", torch.full((100,), float(version)))])
        with receiver.receive(handle) as received:
            assert received.tensors["w"].unique().item() == version
        if version % 2 == 0:
            for directory in tmp_path.glob("v*"):
                shutil.rmtree(directory)
    assert [path.name for path in tmp_path.glob("v*")] == ["v00000005"]
    sender.close()
