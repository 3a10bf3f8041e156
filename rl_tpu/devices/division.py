"""Who gets which chips: the trainer and the engines of one run, on all hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_tpu.errors import UserError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class Division:
    """What is to be divided, as the configuration says it."""

    hosts: int
    chips_per_host: int
    devices_per_chip: int
    trainer_chips: int
    engines: int
    chips_per_engine: int
    generation: str = ""
    joined: bool = False
    """Trainer and engines exchange weights over the links between chips: they must all be of one slice."""

    @property
    def rollout_chips(self) -> int:
        return self.engines * self.chips_per_engine


@dataclass(frozen=True)
class Block:
    """Chips of one host that belong to the trainer, or to one engine."""

    host: int
    chips: tuple[int, ...]
    """Chip numbers on that host."""


@dataclass(frozen=True)
class Divided:
    """The trainer's part of every host that trains, and every engine's."""

    trainer: tuple[Block, ...]
    engines: tuple[Block, ...]


@dataclass(frozen=True)
class Environments:
    """Environment variables of every process beyond those of its ranks and threads; empty where a device needs none."""

    trainer: tuple[dict[str, str], ...]
    """By rank."""
    engines: tuple[tuple[dict[str, str], ...], ...]
    """By engine, then by tensor-parallel rank."""


@dataclass(frozen=True)
class HostReservation:
    """Whole hosts that Ray reserved, one bundle each."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    """Bundle of every host, in the hosts' order."""
    addresses: tuple[str, ...]
    """Of every host."""
    close: Callable[[], None]
    """Gives them back."""


def in_order(division: Division) -> Divided:
    """The trainer takes the first chips, the engines what follows.

    Raises:
        UserError: an engine would span two hosts.
    """
    each = division.chips_per_host
    trainer = [
        Block(host, tuple(range(min(each, division.trainer_chips - host * each))))
        for host in range(-(-division.trainer_chips // each))
    ]
    engines = []
    for engine in range(division.engines):
        first = division.trainer_chips + engine * division.chips_per_engine
        last = first + division.chips_per_engine - 1
        host, start = divmod(first, each)
        if last // each != host:
            raise UserError(
                f"engine {engine} needs chips {first}-{last} of two hosts ({each} chips each):"
                " change cluster.trainer_chips or rollout.tensor_parallel so that an engine stays on one host"
            )
        engines.append(Block(host, tuple(range(start, start + division.chips_per_engine))))
    return Divided(tuple(trainer), tuple(engines))
