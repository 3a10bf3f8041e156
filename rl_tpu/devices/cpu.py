"""The CPU: the same parts, smaller. A chip is a share of the cores."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from rl_tpu.devices.base import Device, MemoryUse


class CpuDevice(Device):
    name = "cpu"
    distributed_backend = "gloo"
    optimizer_implementation = "foreach"
    pins_memory = False
    dynamic_shapes = True
    chip_resource = None

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryUse:
        return MemoryUse(
            used_bytes=psutil.Process().memory_info().rss,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            total_bytes=psutil.virtual_memory().total,
        )

    def synchronize(self) -> None:
        pass

    def torchtitan_module(self) -> Any:
        return torch.cpu

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        cores = os.cpu_count() or 1
        groups = [[(chip * threads + thread) % cores for thread in range(threads)] for chip in chips or (0,)]
        return {
            **super().engine_environment(threads, chips),
            "SGLANG_PLATFORM": "rl_tpu_cpu",
            # One group of cores per tensor-parallel rank. Without it SGLang wants a NUMA node for each rank.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, sorted(set(group)))) for group in groups),
        }

    def engine_options(self, *, context_tokens: int, max_requests: int) -> dict[str, Any]:
        # The engine shares its memory with everything else on the machine, so it may not take most of it.
        return {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.1}
