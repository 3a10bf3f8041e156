"""Shared memory whose receiver breaks on request: a handle with ``fault`` meets it once, in the middle of the load.

The request is a file, ``fault["file"]``, which is removed when the fault strikes; ``fault["kind"]`` is ``raise`` or ``kill``.
"""

from __future__ import annotations

import os
import signal
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
        received = super().receive(handle)
        if "fault" in handle:
            received.tensors = FaultyTensors(received.tensors)
            received.tensors.fault = handle["fault"]
        return received


TRANSPORT = Transport(SharedMemorySender, FaultyReceiver)
