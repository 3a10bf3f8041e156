"""Weights through storage: a version is a directory at a local path or any fsspec URL.

A full version is a normal Hugging Face checkpoint that SGLang, vLLM and transformers load by themselves. With
``full_every`` > 1 the versions between are deltas: only what changed since the version before.
"""

from functools import partial

from weight_sync.disk.receiver import DiskReceiver
from weight_sync.disk.sender import DiskSender, latest
from weight_sync.transport import Transport

__all__ = ["DELTA_TRANSPORT", "TRANSPORT", "DiskReceiver", "DiskSender", "latest"]

TRANSPORT = Transport(DiskSender, DiskReceiver)
DELTA_TRANSPORT = Transport(partial(DiskSender, full_every=10), partial(DiskReceiver, keep_base=True))
