"""Cloud TPUs through torch_tpu: one process per device, two devices per chip on v7x.

Which chips form a slice and what its processes are told is in `tpu_slices.py`, several hosts in `tpu_hosts.py`, the
generations' figures in `generations.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule

from rl_tpu.devices import tpu_hosts, tpu_slices
from rl_tpu.devices.base import Device, MemoryUse
from rl_tpu.devices.division import Divided, Division, Environments, HostReservation
from rl_tpu.devices.generations import get_generation
from rl_tpu.errors import RunError

LARGEST_PREFILL = 4096
"""Tokens of the largest prefill program; longer prompts are read in chunks of so many. sglang-jax's default."""
SMALLEST_PREFILL = 128
EAGER_MODES = {"fused": "DEFER_AND_FUSE", "strict": "DEFER_NEVER", "debug": "DEFER_NEVER_AND_LAUNCH_BLOCKING"}
"""torch_tpu's names of `trainer.execution.eager`."""


class TpuDevice(Device):
    name = "tpu"
    distributed_backend = "tpu:tpu_dist,cpu:gloo"
    optimizer_implementation = "foreach"
    compile_backend = "tpu"
    compiler_packages = ("torch", "torch_tpu", "libtpu")
    program_cache_variable = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
    pins_memory = False
    eager_modes = ("default", *EAGER_MODES)
    compiled_ahead = True
    package_extra = "tpu"
    chip_resource = "TPU"

    def torch_device(self, local_rank: int) -> torch.device:
        # torch does not load it by itself (rl_tpu/__init__.py), and torch_tpu 0.2.0 has no public function that does.
        from torch_tpu import _loader

        _loader.load()
        try:
            device = torch.device("tpu")
        except RuntimeError:
            raise RunError(
                "torch_tpu found no TPU on this host (it looks for Google's PCI devices with an entry in /dev/vfio)"
            ) from None
        from rl_tpu.tpu.runtime import register_kernels  # imports JAX, which the driver does without

        register_kernels()
        return device

    def memory(self) -> MemoryUse:
        return MemoryUse(None, None, None)  # torch_tpu 0.2.0 has no memory statistics

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def prepare_execution(self, eager: str) -> None:
        if eager != "default":
            torch.tpu.eager_mode = getattr(torch.tpu.EagerMode, EAGER_MODES[eager])

    def compile_graph(self, graph: GraphModule) -> Callable[..., Any]:
        # Not yet run on hardware.
        return torch.compile(graph, backend=self.compile_backend, fullgraph=True, dynamic=False)

    def programs(self) -> dict[str, int]:
        # torch_tpu 0.2.0 tells of hits and misses in its log alone. What lies in the directory is all ranks', so one counts.
        directory = os.environ.get(self.program_cache_variable)
        if not directory or os.environ.get("RANK", "0") != "0":
            return {"cache_misses": 0}
        return {"cache_misses": sum(len(files) for _, _, files in os.walk(directory))}

    def torchtitan_module(self) -> Any:
        # The functions of `torch.tpu` that torchtitan looks for raise in torch_tpu 0.2.0; torch.accelerator's work.
        return SimpleNamespace(
            device_count=torch.accelerator.device_count,
            is_available=torch.accelerator.is_available,
            set_device=torch.accelerator.set_device_index,
            current_device=torch.accelerator.current_device_index,
            synchronize=torch.accelerator.synchronize,
        )

    def ray_resources(self, chips: float, cpus_per_chip: float) -> dict[str, float]:
        # Ray counts devices instead of chips where its nodes were started with this variable (v7x: 2).
        per_chip = int(os.environ.get("RAY_TPU_RESOURCE_PER_CHIP", "1"))
        return {"CPU": chips * cpus_per_chip, "TPU": chips * per_chip}

    def divide(self, division: Division) -> Divided:
        return tpu_slices.divide(division)

    def environments(self, division: Division, divided: Divided, addresses: Sequence[str]) -> Environments:
        return tpu_slices.environments(division, divided, addresses)

    def reserve_hosts(self, division: Division, cpus_per_chip: float, timeout_s: float) -> HostReservation | None:
        if division.hosts == 1:
            return None
        resources = self.ray_resources(division.chips_per_host, cpus_per_chip)
        generation = get_generation(division.generation)
        return tpu_hosts.reserve(generation, division.hosts, division.chips_per_host, resources, timeout_s)

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        return {
            **super().engine_environment(threads, chips),
            "SGLANG_PLATFORM": "tpu_oot",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # nothing in SGLang loads torch_tpu by name
        }

    def engine_options(self, *, context_tokens: int, max_requests: int) -> dict[str, Any]:
        # One compiled program for each: prefill by tokens of a batch, decoding by samples.
        prefill = _powers_of_two(SMALLEST_PREFILL, min(LARGEST_PREFILL, context_tokens))
        return {
            "device": "tpu",
            "chunked_prefill_size": prefill[-1],
            "max_prefill_tokens": prefill[-1],
            "cuda_graph_bs_prefill": prefill,
            "cuda_graph_bs_decode": _powers_of_two(1, max_requests),
        }


def _powers_of_two(first: int, last: int) -> list[int]:
    """From `first` to the first one that is not less than `last`."""
    powers = [first]
    while powers[-1] < last:
        powers.append(2 * powers[-1])
    return powers
