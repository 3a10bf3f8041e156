"""Chips of TPU hosts that form slices, and what each process of a slice is told. Pure; no chip is needed.

Processes of one slice reach each other over ICI. torch_tpu 0.2.0 has one process per device and makes one slice of those
that were given the same TORCH_TPU_TOPOLOGY (`x,y,z` in chips, and the devices of a chip where it has several) and the same
TORCH_TPU_SLICEBUILDER_ADDRESSES (one `host:port` per process, in rank order). From these it sets libtpu's own variables,
TPU_HOST_BOUNDS, TPU_PROCESS_BOUNDS, TPU_PROCESS_ADDRESSES and so on, and *overwrites* TPU_VISIBLE_CHIPS: a process takes the
device that TPU_VISIBLE_DEVICES names, if that is a single one, else the one numbered LOCAL_RANK. So a host is shared
between slices by TPU_VISIBLE_DEVICES alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_tpu.devices.division import Block, Divided, Division, Environments
from rl_tpu.devices.generations import Generation, get_generation
from rl_tpu.errors import UserError

FIRST_PORT = 8471
"""Of the process of a host's first device, as Ray and GKE count them; the others follow. No two slices share a port."""


@dataclass(frozen=True)
class Seat:
    """Where one process computes: a host, and the number of a device on it."""

    host: int
    device: int


def divide(division: Division) -> Divided:
    """The trainer takes the first chips that form a slice, every engine the next ones of a host that do.

    A trainer of more than one host takes whole hosts. Hosts are numbered along x, then y, then z.

    Raises:
        UserError: no such division; with those that are possible.
    """
    generation, each = get_generation(division.generation), division.chips_per_host
    _check(division, generation)
    trainer_hosts = -(-division.trainer_chips // each)
    trainer = [Block(host, tuple(range(min(each, division.trainer_chips)))) for host in range(trainer_hosts)]
    size, taken = division.chips_per_engine, {(block.host, chip) for block in trainer for chip in block.chips}
    free = [
        Block(host, tuple(range(start, start + size)))
        for host in range(division.hosts)
        for start in range(0, each, size)  # from elsewhere they are not all neighbours
        if not any((host, chip) in taken for chip in range(start, start + size))
    ]
    if len(free) < division.engines:
        raise UserError(
            f"rollout.engines {division.engines} of {size} neighbouring chips do not fit beside cluster.trainer_chips"
            f" {division.trainer_chips}, {len(free)} do: take fewer, or smaller ones (rollout.tensor_parallel)"
        )
    return Divided(tuple(trainer), tuple(free[: division.engines]))


def _check(division: Division, generation: Generation) -> None:
    """UserError for the first thing that is no slice."""
    each, sizes = division.chips_per_host, generation.slice_sizes
    host = [size for size in sizes if size <= each]
    all_chips = division.hosts * each
    if division.hosts > 1 and all_chips not in sizes:
        wrong = _no_slice(all_chips, generation, 2 * all_chips)
        raise UserError(f"cluster.hosts {division.hosts} x chips_per_host {each}: {wrong}")
    trainer = division.trainer_chips
    if trainer not in sizes or (trainer > each and trainer % each):
        raise UserError(
            f"cluster.trainer_chips {trainer}: {_no_slice(trainer, generation, all_chips)};"
            f" {division.hosts} host(s) x {each} chips can be split as {_possible(division, generation)}"
        )
    if division.chips_per_engine not in host:
        raise UserError(
            f"rollout.tensor_parallel {division.chips_per_engine * division.devices_per_chip} is"
            f" {division.chips_per_engine} chips, which form no slice of a {generation.name} host: an engine takes"
            f" {_either(host)} of its {each} chips, tensor_parallel is"
            f" {_either([size * division.devices_per_chip for size in host])}"
        )
    used = trainer + division.rollout_chips
    if division.joined and (used not in sizes or (used > each and used % each)):
        raise UserError(
            f"weight_sync.transport=ici needs trainer and engines in one slice: cluster.trainer_chips {trainer} +"
            f" rollout_chips {division.rollout_chips} = {used} chips are none; {_either(_up_to(all_chips, division, sizes))}"
            " are, or take another transport"
        )


def _no_slice(chips: int, generation: Generation, limit: int) -> str:
    sizes = [size for size in generation.slice_sizes if size <= limit]
    return f"{chips} chips of {generation.name} form no slice, {_either(sizes)} do"


def _up_to(chips: int, division: Division, sizes: Sequence[int]) -> list[int]:
    """Sizes that whole hosts, or a part of one, can have."""
    each = division.chips_per_host
    return [size for size in sizes if size <= chips and (size <= each or size % each == 0)]


def _possible(division: Division, generation: Generation) -> str:
    chips = division.hosts * division.chips_per_host
    sizes = [size for size in _up_to(chips, division, generation.slice_sizes) if size < chips]
    return ", ".join(f"trainer {size} + rollout {chips - size}" for size in sizes)


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def slice_shape(generation: Generation, chips: int, chips_per_host: int, hosts: int) -> tuple[int, int, int]:
    """(x, y, z) in chips of the first `chips` of a slice of so many hosts: a part of one host, or whole ones."""
    if chips <= chips_per_host:
        return generation.shape(chips)
    host = generation.shape(chips_per_host)
    left, shape = chips // chips_per_host, []
    for whole, part in zip(generation.shape(hosts * chips_per_host), host, strict=True):
        along = min(left, whole // part)
        shape.append(along * part)
        left //= along
    return tuple(shape)


def environments(division: Division, divided: Divided, addresses: Sequence[str]) -> Environments:
    """Of all processes; `addresses` are the hosts', in order. Joined, trainer ranks come first in the one slice."""
    per_chip = division.devices_per_chip
    trainer = [seat for block in divided.trainer for seat in _seats(block, per_chip)]
    engines = [_seats(block, per_chip) for block in divided.engines]

    def of(seats: list[Seat]) -> list[dict[str, str]]:
        generation, chips = get_generation(division.generation), len(seats) // per_chip
        shape = slice_shape(generation, chips, division.chips_per_host, division.hosts)
        return slice_environments(seats, shape, per_chip, addresses)

    if not division.joined:
        return Environments(tuple(of(trainer)), tuple(tuple(of(seats)) for seats in engines))
    everyone = iter(of(trainer + [seat for seats in engines for seat in seats]))
    return Environments(
        tuple(next(everyone) for _ in trainer), tuple(tuple(next(everyone) for _ in seats) for seats in engines)
    )


def _seats(block: Block, devices_per_chip: int) -> list[Seat]:
    return [
        Seat(block.host, chip * devices_per_chip + device) for chip in block.chips for device in range(devices_per_chip)
    ]


def slice_environments(
    seats: Sequence[Seat], shape: Sequence[int], devices_per_chip: int, addresses: Sequence[str]
) -> list[dict[str, str]]:
    """What torch_tpu 0.2.0 wants to know in each process of one slice, in rank order."""
    hosts = [seat.host for seat in seats]
    topology = [*shape, devices_per_chip] if devices_per_chip > 1 else shape
    shared = {
        "WORLD_SIZE": str(len(seats)),
        "MASTER_ADDR": addresses[hosts[0]],  # must be there; the slice itself meets at the addresses below
        "MASTER_PORT": str(FIRST_PORT - 1),
        "TORCH_TPU_TOPOLOGY": ",".join(map(str, topology)),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(
            f"{addresses[seat.host]}:{FIRST_PORT + seat.device}" for seat in seats
        ),
        # A machine of several hosts sets the list of them all.
        "TPU_WORKER_HOSTNAMES": ",".join(addresses[host] for host in dict.fromkeys(hosts)),
    }
    return [
        shared
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(hosts[:rank].count(seat.host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(seat.host)),
            "TORCH_TPU_DEVICES_PER_HOST": str(hosts.count(seat.host)),
            "TPU_VISIBLE_DEVICES": str(seat.device),
        }
        for rank, seat in enumerate(seats)
    ]
