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
    package_extra = "gpu"
    chip_resource = "GPU"

    def torch_device(self, local_rank: int) -> torch.device:
        # Where a process is shown only its own GPU, that one has index 0.
        device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)
        torch.cuda.set_device(device)
        return device

    def memory(self) -> MemoryUse:
        _, total = torch.cuda.mem_get_info()
        return MemoryUse(torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved(), total)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def torchtitan_module(self) -> Any:
        return torch.cuda

    def rank_environment(self, *, chips: Sequence[int] = (), **ranks: Any) -> dict[str, str]:
        return {**super().rank_environment(chips=chips, **ranks), **_visible(chips)}

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        return {**super().engine_environment(threads, chips), **_visible(chips)}

    def engine_options(self, *, context_tokens: int, max_requests: int) -> dict[str, Any]:
        return {"device": "cuda"}


def _visible(chips: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chips))} if chips else {}
