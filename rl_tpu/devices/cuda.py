"""NVIDIA GPUs: the same code path as a TPU's, for comparison and development."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_tpu.devices.base import Device, MemoryUse


class CudaDevice(Device):
    name = "cuda"
    distributed_backend = "cuda:nccl,cpu:gloo"
    optimizer_implementation = "fused"
    needs_sum_reduction = False
    chip_resource = "GPU"

    def torch_device(self, local_rank: int) -> torch.device:
        # Ray shows an actor only its own GPU, which then has index 0.
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)

    def memory(self) -> MemoryUse:
        free, total = torch.cuda.mem_get_info()
        return MemoryUse(used_bytes=total - free, peak_bytes=torch.cuda.max_memory_reserved(), total_bytes=total)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def torchtitan_module(self) -> Any:
        return torch.cuda

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chips))} if chips else {}
        return {**super().engine_environment(threads, chips), **visible}

    def engine_options(self) -> dict[str, Any]:
        return {"device": "cuda"}
