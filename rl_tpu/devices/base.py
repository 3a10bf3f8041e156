"""What every kind of device answers; the kinds differ only in the classes beside this file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

from rl_tpu.devices.division import Divided, Division, Environments, HostReservation, in_order
from rl_tpu.errors import UserError


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the device's memory: in use by this process, its peak so far, and in all. None where nothing tells."""

    used_bytes: int | None
    peak_bytes: int | None
    total_bytes: int | None


class Device(ABC):
    """One kind of accelerator: how its processes are placed, launched and joined, and what torch calls it.

    Nothing here starts the accelerator's runtime at import: the driver asks these questions on a machine without one.
    """

    name: ClassVar[str]
    """torch's device type and the value of `cluster.device`."""
    distributed_backend: ClassVar[str]
    """Backend string for `torch.distributed`; host tensors (metadata of checkpoints) always go through gloo."""
    optimizer_implementation: ClassVar[str]
    """The fastest implementation torchtitan's optimizer container can use: `fused`, `foreach` or `for-loop`."""
    compile_backend: ClassVar[str] = "inductor"
    """What `torch.compile` compiles with."""
    compiler_packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Whose versions its programs depend on."""
    program_cache_variable: ClassVar[str] = "TORCHINDUCTOR_CACHE_DIR"
    """Environment variable that names the directory in which the compiler keeps programs."""
    pins_memory: ClassVar[bool] = True
    """Host memory can be pinned, for copies to the device that overlap with computing."""
    dynamic_shapes: ClassVar[bool] = False
    """Programs may depend on the data: padding is left out and attention goes segment by segment. Else every shape is
    that of the packed rows, for devices that compile one program per shape."""
    eager_modes: ClassVar[tuple[str, ...]] = ("default",)
    """Values of `trainer.execution.eager` that it knows."""
    compiled_ahead: ClassVar[bool] = False
    """Programs can be compiled for slices of it on a machine that has none."""
    package_extra: ClassVar[str] = ""
    """Optional dependencies of this package that it needs."""
    chip_resource: ClassVar[str | None]
    """Ray's resource name of one chip; None where a chip is only a share of the cores."""

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """The device that the process with this local rank computes on, made its current one."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Memory of the current process's device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return once everything launched on the device has finished."""

    def prepare_execution(self, eager: str) -> None:
        """Choose how this process's operations are sent to the device, by `trainer.execution.eager`, before the first one."""
        self.check_eager(eager)

    def check_eager(self, eager: str) -> None:
        """UserError where it does not know this value of `trainer.execution.eager`."""
        if eager not in self.eager_modes:
            raise UserError(
                f"trainer.execution.eager {eager} is torch_tpu's: with cluster.device {self.name} use default"
            )

    def compile_graph(self, graph: GraphModule) -> Callable[..., Any]:
        """What computes a captured graph of static shapes on this device."""
        return graph

    def programs(self) -> dict[str, int]:
        """Programs that this process has compiled (`cache_misses`) and, where the compiler tells, that it has found in the
        directory of `program_cache_variable` instead (`cache_hits`)."""
        from torch._dynamo.utils import counters  # takes a second

        count = counters["inductor"]
        return {
            "cache_hits": count["fxgraph_cache_hit"],
            "cache_misses": count["fxgraph_cache_miss"] + count["fxgraph_cache_bypass"],
        }

    @abstractmethod
    def torchtitan_module(self) -> Any:
        """The object torchtitan asks for device counts and synchronisation."""

    def ray_resources(self, chips: float, cpus_per_chip: float) -> dict[str, float]:
        """Resources of a Ray bundle that holds so many chips. A fraction of a chip is one of its several devices."""
        resources = {"CPU": chips * cpus_per_chip}
        if self.chip_resource:
            resources[self.chip_resource] = chips
        return resources

    def divide(self, division: Division) -> Divided:
        """Which chips train and which write answers. Pure; the same on every machine.

        Raises:
            UserError: the chips cannot be divided so.
        """
        return in_order(division)

    def environments(self, division: Division, divided: Divided, addresses: Sequence[str]) -> Environments:
        """What each process must know of its chips and its neighbours before it starts; `addresses` are the hosts'."""
        ranks = sum(len(block.chips) for block in divided.trainer) * division.devices_per_chip
        workers = division.chips_per_engine * division.devices_per_chip
        return Environments(({},) * ranks, (({},) * workers,) * len(divided.engines))

    def reserve_hosts(self, division: Division, cpus_per_chip: float, timeout_s: float) -> HostReservation | None:
        """All hosts at once, where it matters how they are wired; else None.

        Raises:
            RunError: Ray did not reserve them.
        """
        return None

    def rank_environment(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        threads: int,
        master_address: str,
        master_port: int,
        chips: Sequence[int] = (),
    ) -> dict[str, str]:
        """Environment of one trainer rank, to be set before torch touches the device, on top of `environments`.

        `chips` are the host's chips that the ranks of this host share (empty: all).
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
            **thread_environment(threads),
        }

    def engine_environment(self, threads: int, chips: Sequence[int] = ()) -> dict[str, str]:
        """Environment of one engine process; `chips` are the host's chips it may use (empty: all)."""
        return thread_environment(threads)

    def engine_options(self, *, context_tokens: int, max_requests: int) -> dict[str, Any]:
        """SGLang server arguments that depend on the device, for an engine that serves `max_requests` samples of up to
        `context_tokens` at the same time."""
        return {}


def thread_environment(threads: int) -> dict[str, str]:
    """Limits of every thread pool that numerical libraries open."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
