"""Which slice the trainer's programs are compiled for."""

from __future__ import annotations

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices.generations import Generation, get_generation
from rl_tpu.errors import UserError


def generation_of(config: RunConfig) -> Generation:
    """The generation that `preflight.topology` names, else the cluster's.

    Raises UserError where neither says one, or one that there is not.
    """
    if topology := config.preflight.topology:
        name, colon, _ = topology.partition(":")
        if not colon:
            raise UserError(f"preflight.topology={topology!r} is no GENERATION:SHAPE, for example TPU7x:2x2x1")
        try:
            return get_generation(name)
        except UserError as error:
            raise UserError(f"preflight.topology={topology!r}: {str(error).partition(': ')[2]}") from None
    name = config.cluster.generation
    if not name:
        raise UserError(
            "cluster.generation is not set, so there is nothing to compile for: set it (v7x, v6e, v5p, v5e), or"
            " preflight.topology=TPU7x:2x2x1"
        )
    return get_generation(name)


def topology_of(config: RunConfig) -> str:
    """libtpu's name of the slice: `preflight.topology`, else the smallest one with all chips of the trainer's hosts."""
    cluster, generation = config.cluster, generation_of(config)
    if config.preflight.topology:
        return config.preflight.topology
    hosts = -(-cluster.trainer_chips // cluster.chips_per_host)
    chips = hosts * cluster.chips_per_host
    sizes = [size for size in generation.slice_sizes if size >= chips]
    if not sizes:
        raise UserError(
            f"cluster: {chips} chips of {hosts} trainer host(s) are more than one slice of {generation.name} has"
            f" ({generation.slice_sizes[-1]})"
        )
    return generation.topology(sizes[0])
