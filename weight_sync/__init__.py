"""Carries every new policy from the trainer's ranks to the engines, and proves that it arrived whole."""

from weight_sync.errors import CoverageError, SpaceError, StaleHandleError, VerificationError, WeightSyncError
from weight_sync.manifest import Manifest, ManifestDiff, TensorEntry
from weight_sync.sender import Region
from weight_sync.shard import Shard, local_shards
from weight_sync.shared_memory.segments import remove_segments, remove_stale_segments
from weight_sync.transport import Handle, Received, Receiver, Sender, Transport, open_receiver, open_sender

__all__ = [
    "CoverageError",
    "Handle",
    "Manifest",
    "ManifestDiff",
    "Received",
    "Receiver",
    "Region",
    "Sender",
    "Shard",
    "SpaceError",
    "StaleHandleError",
    "TensorEntry",
    "Transport",
    "VerificationError",
    "WeightSyncError",
    "local_shards",
    "open_receiver",
    "open_sender",
    "remove_segments",
    "remove_stale_segments",
]
