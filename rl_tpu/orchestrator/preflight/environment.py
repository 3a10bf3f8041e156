"""Is the machine as the configuration says: packages, chips, disk, shared memory, and all ranks within reach?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import ray
from packaging.requirements import Requirement

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.orchestrator.preflight.collective import Missing, end_ranks, start_ranks, sum_over_ranks
from rl_tpu.orchestrator.preflight.host import HostFacts, chip_files, host_facts
from rl_tpu.orchestrator.preflight.model import ModelSizes

POLICIES_IN_SHARED_MEMORY = 2
"""The one that engines read, and the next one while it is written."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "failed", "note", "skipped"]
    """`note` says something that this machine need not fulfil."""
    detail: str


def check_environment(config: RunConfig, sizes: ModelSizes, run_dir: Path) -> list[Check]:
    """Every check that this machine allows, in the order in which a run would meet them.

    Where the configuration is for a TPU and this host has none (and no Ray cluster is named), what concerns the TPU host is
    skipped and said to be.
    """
    checks = [check_packages(config.cluster.device), check_disk(config, sizes, run_dir)]
    joins = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    if _is_elsewhere(config) and not joins:
        skipped = [Check(name, "skipped", "not on a TPU host") for name in ("chips", "collective")]
        return [*checks, check_shared_memory(config, sizes, host_facts(), judge=False), *skipped]
    return [*checks, *_on_hosts(config, sizes, run_dir)]


def _is_elsewhere(config: RunConfig) -> bool:
    """The configuration is for chips that this machine does not have."""
    return get_device(config.cluster.device).compiled_ahead and not chip_files()


def check_packages(device: str) -> Check:
    """Installed versions against those that the package was built for, with the extra of the device."""
    extra, wrong, count = get_device(device).package_extra, [], 0
    for requirement in map(Requirement, metadata.requires("rl_tpu") or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        count += 1
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing (wanted {requirement.specifier or 'any version'})")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, wanted {requirement.specifier}")
    if wrong:
        return Check("packages", "failed", "; ".join(wrong))
    return Check("packages", "ok", f"{count} packages as the project asks for them; python {sys.version.split()[0]}")


def check_disk(config: RunConfig, sizes: ModelSizes, run_dir: Path) -> Check:
    """Room for the checkpoints that a run keeps, one more while it is written, and the exported policy."""
    checkpoint = config.trainer.checkpoint
    need = (checkpoint.keep + 1) * sizes.checkpoint + checkpoint.export_final * sizes.engine_policy
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = (
        f"{_gb(free)} free in {there}; {checkpoint.keep + 1} checkpoints of {_gb(sizes.checkpoint)} and the export need"
        f" {_gb(need)}"
    )
    if free >= need:
        return Check("disk", "ok", text)
    return Check(
        "disk",
        "note" if _is_elsewhere(config) else "failed",
        text + ": choose another run_dir or lower checkpoint.keep",
    )


def check_shared_memory(config: RunConfig, sizes: ModelSizes, facts: HostFacts, judge: bool = True) -> Check:
    """Room for two copies of the policy in /dev/shm, where weights go that way. Without `judge` it is only reported."""
    name = f"/dev/shm on {facts.name}"
    if config.weight_sync.transport != "shared_memory":
        return Check(name, "skipped", f"weight_sync.transport {config.weight_sync.transport} does not use it")
    need = POLICIES_IN_SHARED_MEMORY * sizes.engine_policy
    text = (
        f"{_gb(facts.shm_free)} of {_gb(facts.shm_total)} free, {_gb(facts.memory_available)} of memory; two policies need"
        f" {_gb(need)}"
    )
    if need <= min(facts.shm_free, facts.memory_available):
        return Check(name, "ok" if judge else "note", text)
    wanted = f"{need // 2**30 + 1}g"
    text += f": docker --shm-size={wanted}; Kubernetes: emptyDir of medium Memory at /dev/shm, within the pod's limit"
    return Check(name, "failed" if judge else "note", text)


def check_chips(config: RunConfig, facts: HostFacts, seen_by_torch: int | str) -> Check:
    """Chips of one host: its device files, the devices torch_tpu counts, and that nobody holds them.

    `seen_by_torch` is a number of devices, or why torch_tpu could not count.
    """
    cluster, name = config.cluster, f"chips of {facts.name}"
    if facts.holders:
        held = "; ".join(f"{holder.file} by process {holder.pid} ({holder.name})" for holder in facts.holders)
        return Check(name, "failed", f"held: {held}: end those processes")
    hidden = f"; {facts.unreadable_processes} processes of other users not looked into" * bool(
        facts.unreadable_processes
    )
    text = f"{len(facts.chip_files)} device files; torch_tpu: {seen_by_torch}{hidden}"
    right = seen_by_torch == cluster.chips_per_host * cluster.devices_per_chip
    if right and len(facts.chip_files) >= cluster.chips_per_host:
        return Check(name, "ok", text)
    wanted = f"cluster.chips_per_host {cluster.chips_per_host} x devices_per_chip {cluster.devices_per_chip}"
    return Check(name, "failed", f"{text}; the configuration says {wanted}")


def devices_of_torch_tpu(timeout_s: float = 120.0) -> int | str:
    """How many devices torch_tpu sees on this host, or why it cannot say; asked in a process of its own, for torch loads
    torch_tpu when it is imported or not at all."""
    program = "import torch; print(torch.accelerator.device_count())"  # a look at the PCI bus: takes no chip
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return int(done.stdout.split()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except (ValueError, IndexError):
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]


def _on_hosts(config: RunConfig, sizes: ModelSizes, run_dir: Path) -> Iterator[Check]:
    """Start or join Ray, reserve the trainer's chips, and ask every rank."""
    device = get_device(config.cluster.device)
    if chip_files() and device.compiled_ahead:  # before Ray's processes are there
        yield check_chips(config, host_facts(), devices_of_torch_tpu())
    try:
        with Placement(config, roles=("trainer",)) as placement:
            if device.chip_resource:
                yield _chips_of_ray(config, device.chip_resource)
            ranks = start_ranks(config, placement.trainer_options(), run_dir / "logs")
            try:
                for facts in _one_per_host(ranks.facts):
                    yield check_shared_memory(config, sizes, facts)
                seconds = sum_over_ranks(config, ranks)
            finally:
                end_ranks(ranks.actors)
    except (UserError, RunError, Missing) as error:
        yield Check("collective", "failed", str(error))
    else:
        text = f"{len(ranks.actors)} rank(s) on {len(_one_per_host(ranks.facts))} host(s), {seconds * 1e3:.1f} ms"
        yield Check("collective", "ok", f"{text}, backend {device.distributed_backend}")


def _chips_of_ray(config: RunConfig, resource: str) -> Check:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = {node["NodeManagerHostname"]: node["Resources"].get(resource, 0.0) for node in nodes}
    wanted = config.cluster.hosts * config.cluster.chips_per_host
    text = ", ".join(f"{host}: {count:g}" for host, count in each.items())
    enough = sum(each.values()) >= wanted
    return Check(f"{resource} of Ray", "ok" if enough else "failed", f"{text}; the configuration says {wanted} in all")


def _one_per_host(facts: Sequence[HostFacts]) -> list[HostFacts]:
    return list({each.name: each for each in facts}.values())


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
