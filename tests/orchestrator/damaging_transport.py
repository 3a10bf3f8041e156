"""Shared memory in which version 2 has a wrong byte, unless it is published again."""

from __future__ import annotations

import numpy as np

from weight_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from weight_sync.shared_memory.segments import PAGE_BYTES
from weight_sync.transport import Transport


class DamagingSender(SharedMemorySender):
    def publish(self, version, shards, whole=False):
        handle = super().publish(version, shards, whole)
        if version == 2 and not whole:
            np.memmap(handle["path"], dtype=np.uint8, mode="r+")[PAGE_BYTES + 1000] ^= 1
        return handle


TRANSPORT = Transport(DamagingSender, SharedMemoryReceiver)
