"""What libtpu says of a program, on a machine without a TPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


def compiled_for(topology: str, function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> Any:
    """`function` as libtpu compiles it for one device of the topology."""
    sharding = SingleDeviceSharding(_device(topology))
    operands = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in shapes]
    return jax.jit(function).lower(*operands).compile()


@cache
def _device(topology: str) -> jax.Device:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
