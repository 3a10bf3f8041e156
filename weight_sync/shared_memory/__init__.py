"""Weights between processes of one host, through segments in /dev/shm.

Every rank writes its own regions into one segment that holds the whole tensors; engines read them where they are. There
are two segments, so that version v+1 is written while engines still load v. Both are reserved and touched once, when
the first version is published, and reused from then on: the first touch of memory is many times slower than a copy.
"""

from weight_sync.shared_memory.receiver import SharedMemoryReceiver
from weight_sync.shared_memory.sender import SharedMemorySender
from weight_sync.transport import Transport

__all__ = ["TRANSPORT", "SharedMemoryReceiver", "SharedMemorySender"]

TRANSPORT = Transport(SharedMemorySender, SharedMemoryReceiver)
