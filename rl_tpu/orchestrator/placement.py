"""From one description of the machine to Ray placement groups: which chips train and which write answers."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_tpu.config.schema import ClusterConfig, RunConfig
from rl_tpu.devices import get_device
from rl_tpu.devices.division import Divided, Division, Environments, HostReservation
from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.worker_environment import WORKER_ENVIRONMENTS

ROLES = ("trainer", "rollout")


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


def divide(config: RunConfig, roles: Sequence[str] = ROLES) -> tuple[Division, Divided]:
    """How the cluster's chips are divided. Where only one of the roles starts, it does not wait for the other.

    Raises:
        UserError: they cannot be divided so.
    """
    cluster, rollout = config.cluster, config.rollout
    division = Division(
        hosts=cluster.hosts,
        chips_per_host=cluster.chips_per_host,
        devices_per_chip=cluster.devices_per_chip,
        trainer_chips=cluster.trainer_chips,
        engines=rollout.engines,
        chips_per_engine=rollout.tensor_parallel // cluster.devices_per_chip,
        generation=cluster.generation,
        joined=config.weight_sync.transport == "ici" and set(roles) == set(ROLES),
    )
    return division, get_device(cluster.device).divide(division)


def plan(config: RunConfig, roles: Sequence[str] = ROLES) -> list[Slot]:
    """What each bundle of chips is for, the trainer's first. Pure; the same on every machine.

    Raises:
        UserError: the chips cannot be divided so.
    """
    division, divided = divide(config, roles)
    blocks = {"trainer": divided.trainer, "rollout": divided.engines}
    return [
        Slot(role, block.host, block.chips, len(block.chips) * division.devices_per_chip)
        for role in ROLES
        if role in roles
        for block in blocks[role]
    ]


def environments(config: RunConfig, addresses: Sequence[str], roles: Sequence[str] = ROLES) -> Environments:
    """What each process must know of its chips before it starts; `addresses` are the hosts', in order."""
    return get_device(config.cluster.device).environments(*divide(config, roles), addresses)


def bundle(slot: Slot, cluster: ClusterConfig) -> dict[str, float]:
    """What Ray reserves for a slot."""
    chips = slot.devices / cluster.devices_per_chip
    return get_device(cluster.device).ray_resources(chips, cluster.cpus_per_chip)


def check_machine(config: RunConfig, roles: Sequence[str] = ROLES) -> None:
    """Whether this machine has the cores, before anything is started. A cluster is asked when it is joined.

    Raises:
        UserError: it has not; with the numbers.
    """
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return
    wanted = sum(bundle(slot, config.cluster).get("CPU", 0.0) for slot in plan(config, roles))
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

    def __init__(self, config: RunConfig, roles: tuple[str, ...] = ROLES):
        self.config = config
        self.slots = plan(config, roles)
        self._roles = roles
        self._group: PlacementGroup | None = None
        self._hosts: HostReservation | None = None
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
            if self._hosts is not None:
                self._hosts.close()
            else:
                remove_placement_group(self._group)
            self._group = self._hosts = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def trainer_options(self) -> list[dict[str, Any]]:
        """Ray actor options of every trainer rank, in rank order."""
        slots = [
            (index, slot)
            for index, slot in enumerate(self.slots)
            if slot.role == "trainer"
            for _ in range(slot.devices)
        ]
        mine = self._environments().trainer
        return [
            self._options(index, slot.devices) | _runtime(environment)
            for (index, slot), environment in zip(slots, mine, strict=True)
        ]

    def engine_options(self) -> list[dict[str, Any]]:
        """Ray actor options of every engine."""
        slots = [index for index, slot in enumerate(self.slots) if slot.role == "rollout"]
        return [
            self._options(index, 1) | _runtime({WORKER_ENVIRONMENTS: json.dumps(workers)} if any(workers) else {})
            for index, workers in zip(slots, self._environments().engines, strict=True)
        ]

    def engine_chips(self) -> list[tuple[int, ...]]:
        """Chip numbers of every engine on its host."""
        return [slot.chips for slot in self.slots if slot.role == "rollout"]

    def _environments(self) -> Environments:
        addresses = self._hosts.addresses if self._hosts is not None else ["localhost"] * self.config.cluster.hosts
        return environments(self.config, addresses, self._roles)

    def _options(self, index: int, sharers: int) -> dict[str, Any]:
        assert self._group is not None
        slot = self.slots[index]
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._hosts.bundles[slot.host] if self._hosts else index
        )
        cpus = bundle(slot, self.config.cluster).get("CPU", 0.0) / sharers
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
        division, _ = divide(self.config, self._roles)
        self._hosts = get_device(cluster.device).reserve_hosts(division, cluster.cpus_per_chip, cluster.start_timeout_s)
        if self._hosts is not None:
            self._group = self._hosts.group
            return
        self._group = placement_group(bundles, strategy="STRICT_PACK" if cluster.hosts == 1 else "PACK")
        if not self._group.wait(cluster.start_timeout_s):
            free = ray.available_resources()
            raise RunError(
                f"Ray did not reserve {bundles} within cluster.start_timeout_s {cluster.start_timeout_s:g} s; free now:"
                f" { ({name: free.get(name, 0.0) for name in sorted({n for b in bundles for n in b})}) }: another job"
                " holds the rest"
            )


def _runtime(environment: dict[str, str]) -> dict[str, Any]:
    """Ray's option that starts a process with these variables. Without any it takes one that is there already."""
    return {"runtime_env": {"env_vars": environment}} if environment else {}


def _check_reachable(address: str | None, timeout_s: float = 10.0) -> None:
    """ray.init waits for many minutes at an address where nobody listens: try it first."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout_s).close()
