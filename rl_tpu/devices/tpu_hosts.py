"""Several TPU hosts of one slice, reserved through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_tpu.devices.division import HostReservation
from rl_tpu.devices.generations import Generation
from rl_tpu.errors import RunError

TOPOLOGY, WORKER_ID = "ray.io/tpu-topology", "ray.io/tpu-worker-id"
"""Labels that Ray gives to hosts of a slice."""


def reserve(
    generation: Generation, hosts: int, chips_per_host: int, resources: Mapping[str, float], timeout_s: float
) -> HostReservation:
    """All hosts of a slice of that size; or, where Ray's slices are larger, of a part of one that is wired like it.

    `resources` are those of one host.

    Raises:
        RunError: Ray has no such slice, or did not give it in time.
    """
    import ray
    from ray.util import placement_group_table
    from ray.util.tpu import slice_placement_group, subslice_placement_group

    topology = generation.topology(hosts * chips_per_host).partition(":")[2]
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    whole = topology in {node["Labels"].get(TOPOLOGY) for node in nodes.values()}
    what = f"a {generation.name} slice of topology {topology} ({hosts} hosts x {chips_per_host} chips)"
    try:
        handle = (slice_placement_group if whole else subslice_placement_group)(
            topology,
            _ray_name(generation),
            # 8 chips of a v6e slice are one host or two.
            chips_per_vm=chips_per_host,
            resources_per_bundle=dict(resources),
            head_reservation_timeout_s=timeout_s,
        )
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RunError(f"Ray did not reserve {what}: {' '.join(str(error).split())[:400]}") from None
    if not handle.placement_group.wait(timeout_s):
        handle.shutdown()
        raise RunError(
            f"Ray did not reserve {what} within cluster.start_timeout_s {timeout_s:g} s: another job holds hosts of it"
        )
    handle.release_head_pgs()
    placed = placement_group_table(handle.placement_group)["bundles_to_node_id"]
    bundles = in_slice_order(placed, nodes)
    addresses = tuple(nodes[placed[index]]["NodeManagerAddress"] for index in bundles)
    return HostReservation(handle.placement_group, bundles, addresses, handle.shutdown)


def in_slice_order(placed: Mapping[int, str], nodes: Mapping[str, Mapping[str, Any]]) -> tuple[int, ...]:
    """Bundles by the number of their host in its slice. Ray spreads bundles over the hosts in any order."""
    return tuple(sorted(placed, key=lambda index: int(nodes[placed[index]]["Labels"][WORKER_ID])))


def _ray_name(generation: Generation) -> str:
    return {"v5e": "v5litepod"}.get(generation.name, generation.name)
