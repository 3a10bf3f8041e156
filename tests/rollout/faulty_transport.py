"""Shared memory whose receiver breaks on request, by a handle with ``fault``, as long as the file ``fault["file"]`` exists.

``fault["kind"]`` is ``hang``, until the file is gone; or ``raise`` or ``kill``, once, in the middle of the load.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from weight_sync.transport import Received, Transport


class FaultyTensors(dict):
    fault: dict[str, str]

    def items(self):
        for number, item in enumerate(super().items()):
            if number == 3 and Path(self.fault["file"]).exists():
                Path(self.fault["file"]).unlink()
                if self.fault["kind"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("the memory is gone")
            yield item


class FaultyReceiver(SharedMemoryReceiver):
    def receive(self, handle) -> Received:
        while "fault" in handle and handle["fault"]["kind"] == "hang" and Path(handle["fault"]["file"]).exists():
            time.sleep(0.1)
        received = super().receive(handle)
        if "fault" in handle:
            received.tensors = FaultyTensors(received.tensors)
            received.tensors.fault = handle["fault"]
        return received


TRANSPORT = Transport(SharedMemorySender, FaultyReceiver)
