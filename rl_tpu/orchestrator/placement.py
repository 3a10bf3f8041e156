"""From one description of the machine to Ray placement groups: which chips train and which write answers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_tpu.config.schema import ClusterConfig, RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import RunError, UserError


@dataclass(frozen=True)
class Slot:
    """Chips of one host that one bundle reserves: all trainer ranks of that host, or one engine."""

    role: str
    """``trainer`` or ``rollout``."""
    host: int
    chips: tuple[int, ...]
    """Chip numbers on that host."""
    devices: int
    """Devices torch sees in those chips: the number of trainer ranks, or the engine's tensor-parallel size."""


def plan(config: RunConfig) -> list[Slot]:
    """Chips in order: the trainer takes the first ones, the engines what follows. Pure; the same on every machine.

    Raises:
        UserError: an engine would span two hosts.
    """
    cluster, rollout = config.cluster, config.rollout
    slots = []
    for host in range(cluster.hosts):
        first = host * cluster.chips_per_host
        mine = [chip - first for chip in range(cluster.trainer_chips) if first <= chip < first + cluster.chips_per_host]
        if mine:
            slots.append(Slot("trainer", host, tuple(mine), len(mine) * cluster.devices_per_chip))
    each = rollout.tensor_parallel // cluster.devices_per_chip
    for engine in range(rollout.engines):
        first = cluster.trainer_chips + engine * each
        host, start = divmod(first, cluster.chips_per_host)
        if start + each > cluster.chips_per_host:
            raise UserError(
                f"engine {engine} needs chips {first}-{first + each - 1} of two hosts ({cluster.chips_per_host} chips each):"
                " change cluster.trainer_chips or rollout.tensor_parallel so that an engine stays on one host"
            )
        slots.append(Slot("rollout", host, tuple(range(start, start + each)), rollout.tensor_parallel))
    return slots


def bundle(slot: Slot, cluster: ClusterConfig) -> dict[str, float]:
    """What Ray reserves for a slot."""
    chips = slot.devices / cluster.devices_per_chip
    return get_device(cluster.device).ray_resources(chips, cluster.cpus_per_chip)


def check_machine(config: RunConfig) -> None:
    """Whether this machine has the cores, before anything is started. A cluster is asked when it is joined.

    Raises:
        UserError: it has not; with the numbers.
    """
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return
    wanted = sum(bundle(slot, config.cluster).get("CPU", 0.0) for slot in plan(config))
    _require("CPU", wanted, len(os.sched_getaffinity(0)), config.cluster)


def _require(resource: str, wanted: float, there: float, cluster: ClusterConfig) -> None:
    if wanted > there:
        raise UserError(
            f"the run needs {wanted:g} {resource} (cluster.trainer_chips {cluster.trainer_chips} + rollout_chips"
            f" {cluster.rollout_chips}, cpus_per_chip {cluster.cpus_per_chip:g}), this machine has {there:g}: lower them or"
            " take a larger machine"
        )


class Placement:
    """A running (or joined) Ray with the reserved chips. Use as a context manager; leaving it gives everything back."""

    def __init__(self, config: RunConfig, roles: tuple[str, ...] = ("trainer", "rollout")):
        self.config = config
        self.slots = [slot for slot in plan(config) if slot.role in roles]
        self._group: PlacementGroup | None = None
        self._started_ray = False

    def __enter__(self) -> Placement:
        try:
            self._start_ray()
            self._reserve()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the chips back and leave Ray; a Ray that was started here ends."""
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
            self._group = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def trainer_options(self) -> list[dict[str, Any]]:
        """Ray actor options of every trainer rank, in rank order."""
        return [
            self._options(index, slot.devices)
            for index, slot in enumerate(self.slots)
            if slot.role == "trainer"
            for _ in range(slot.devices)
        ]

    def engine_options(self) -> list[dict[str, Any]]:
        """Ray actor options of every engine."""
        return [self._options(index, 1) for index, slot in enumerate(self.slots) if slot.role == "rollout"]

    def engine_chips(self) -> list[tuple[int, ...]]:
        """Chip numbers of every engine on its host."""
        return [slot.chips for slot in self.slots if slot.role == "rollout"]

    def _options(self, index: int, sharers: int) -> dict[str, Any]:
        assert self._group is not None
        reserved = dict(self._group.bundle_specs[index])
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        cpus = reserved.pop("CPU", 0.0) / sharers
        # Accelerators are reserved by the bundle and made visible by devices/: ranks of a bundle share its chips.
        return {"num_cpus": round(cpus, 4), "scheduling_strategy": strategy}

    def _start_ray(self) -> None:
        address = self.config.cluster.address or os.environ.get("RAY_ADDRESS")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            _check_reachable(address)
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"join the Ray cluster at {address!r}" if address else "start Ray"
            raise RunError(f"could not {where}: {' '.join(str(error).split())}") from None
        self._started_ray = True

    def _reserve(self) -> None:
        cluster = self.config.cluster
        bundles = [bundle(slot, cluster) for slot in self.slots]
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for resource in sorted({name for b in bundles for name in b}):
            wanted = sum(b.get(resource, 0.0) for b in bundles)
            each = [node.get(resource, 0.0) for node in nodes]
            there = max(each, default=0.0) if cluster.hosts == 1 else sum(each)
            _require(resource, wanted, there, cluster)
        self._group = placement_group(bundles, strategy="STRICT_PACK" if cluster.hosts == 1 else "PACK")
        if not self._group.wait(cluster.start_timeout_s):
            free = ray.available_resources()
            raise RunError(
                f"Ray did not reserve {bundles} within cluster.start_timeout_s {cluster.start_timeout_s:g} s; free now:"
                f" { ({name: free.get(name, 0.0) for name in sorted({n for b in bundles for n in b})}) }: another job"
                " holds the rest"
            )


def _check_reachable(address: str | None, timeout_s: float = 10.0) -> None:
    """ray.init waits for many minutes at an address where nobody listens: try it first."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout_s).close()
