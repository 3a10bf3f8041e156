"""The trainer's process group: of all ranks where a launcher described them, else of this process alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from rl_tpu.devices import Device


def join(device: Device, timeout_s: float) -> None:
    """Join the process group that RANK, WORLD_SIZE and MASTER_ADDR describe; a collective fails after `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(device.distributed_backend, timeout=timeout)
    else:
        dist.init_process_group(
            device.distributed_backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
