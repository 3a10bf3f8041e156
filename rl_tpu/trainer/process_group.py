"""The trainer's process group: of all ranks where a launcher described them, else of this process alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from rl_tpu.devices import Device


def join(device: Device, timeout_s: float, store: dist.Store | None = None) -> None:
    """Join the process group that RANK and WORLD_SIZE describe, meeting in `store` (default: at MASTER_ADDR). Without
    them, be the only rank. A collective fails after `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        dist.init_process_group(
            device.distributed_backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    elif store is None:
        dist.init_process_group(device.distributed_backend, timeout=timeout)
    else:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(device.distributed_backend, timeout=timeout, store=store, rank=rank, world_size=ranks)


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
