"""Shared memory that takes as long as a test wants: while the file ``handle["gate"]["staging"]`` exists nothing is received,
while ``handle["gate"]["loading"]`` exists the load stands still after its third tensor."""

from __future__ import annotations

import time
from pathlib import Path

from weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from weight_sync.transport import Received, Transport

LONGEST_S = 120.0


def wait_while_there(path: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class GatedTensors(dict):
    gate: str

    def items(self):
        for number, item in enumerate(super().items()):
            if number == 3:
                wait_while_there(self.gate)
            yield item


class GatedReceiver(SharedMemoryReceiver):
    def receive(self, handle) -> Received:
        wait_while_there(handle["gate"]["staging"])
        received = super().receive(handle)
        received.tensors = GatedTensors(received.tensors)
        received.tensors.gate = handle["gate"]["loading"]
        return received


TRANSPORT = Transport(SharedMemorySender, GatedReceiver)
