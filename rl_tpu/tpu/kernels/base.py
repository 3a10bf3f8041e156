"""What composing a program has to know about a kernel besides its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Kernel:
    """The JAX twin of a torch operator.

    function   the operator's arguments in its order (static numbers as Python numbers) and `interpret: bool`; returns an
               array or a tuple of arrays as the operator does
    inputs     how the array arguments are divided on a mesh with axes `data` and `tensor`, for jax.shard_map
    outputs    likewise, for the results
    reduced    indices of the results that every `data` share computes a part of: they are summed over that axis
    flops      useful floating-point operations, from the operator's arguments (arrays or shapes)
    """

    function: Callable[..., Any]
    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    flops: Callable[..., float]
    reduced: tuple[int, ...] = ()
