"""Which rank sends which region to whom, where senders and receivers hold a policy in different shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weight_sync.errors import CoverageError
from weight_sync.sender import Region, holders_of


@dataclass(frozen=True)
class Transfer:
    """``region`` of a tensor travels from rank ``source`` of the senders to rank ``destination`` of the receivers."""

    source: int
    destination: int
    region: Region


def plan_transfers(
    held: Sequence[Sequence[Region]],
    wanted: Sequence[Sequence[Region]],
    same_process: Mapping[int, int] | None = None,
) -> list[Transfer]:
    """How every receiver comes by its regions: each wanted element travels once, from one rank that holds it.

    held          regions of each source rank; several ranks may hold the same elements
    wanted        regions of each destination rank
    same_process  destination rank -> the source rank that is the same process: what it holds does not travel

    Where several ranks hold a region, the one with the fewest bytes to send so far sends it, the largest regions first.
    The transfers come in the order of ``wanted``, and are the same wherever they are computed. Raises CoverageError,
    naming the tensor, where a wanted element is held by nobody or both sides disagree about dtype or shape.
    """
    holders = holders_of(held)
    pieces: list[tuple[int, Region, list[int]]] = []  # destination, region, who could send it
    for destination, regions in enumerate(wanted):
        local = (same_process or {}).get(destination)
        taken: dict[str, list[Region]] = defaultdict(list)
        for region in regions:
            of_tensor = holders.get(region.name, {})
            _check_agreement(region, of_tensor, destination)
            missing = _subtract([region], taken[region.name])
            taken[region.name].append(region)
            missing = _subtract(missing, [have for have, ranks in of_tensor.items() if local in ranks])
            for have, ranks in of_tensor.items():
                pieces += [(destination, part, ranks) for rest in missing if (part := _intersection(rest, have)).size]
                missing = _subtract(missing, [have])
            if missing:
                raise CoverageError(
                    f"{region.name} {list(region.global_shape)}: receiver {destination} wants {missing[0]}, which no "
                    "sender rank holds"
                )

    load = [0] * len(held)
    source = [0] * len(pieces)
    # What only one rank can send comes first: it fills the loads that the choices then level.
    for index in sorted(range(len(pieces)), key=lambda index: (len(pieces[index][2]) > 1, -pieces[index][1].nbytes)):
        _, region, ranks = pieces[index]
        source[index] = min(ranks, key=lambda rank: load[rank])
        load[source[index]] += region.nbytes
    return [Transfer(rank, destination, part) for rank, (destination, part, _) in zip(source, pieces, strict=True)]


def _intersection(one: Region, other: Region) -> Region:
    """The elements of ``one`` that lie in ``other`` too, possibly none."""
    spans = list(zip(one.offsets, one.shape, other.offsets, other.shape, strict=True))
    starts = tuple(max(a, b) for a, _, b, _ in spans)
    ends = tuple(min(a + n, b + m) for a, n, b, m in spans)
    return replace(one, offsets=starts, shape=tuple(max(0, end - at) for at, end in zip(starts, ends, strict=True)))


def _subtract(regions: list[Region], others: Sequence[Region]) -> list[Region]:
    """Disjoint regions with the elements of ``regions`` that lie in none of ``others``."""
    regions = [region for region in regions if region.size]
    for other in others:
        regions = [part for region in regions for part in _without(region, other)]
    return regions


def _without(region: Region, other: Region) -> list[Region]:
    """``region`` minus ``other``: per dimension, what lies before and after the part that both have."""
    common = _intersection(region, other)
    if not common.size:
        return [region]
    parts, rest = [], region
    for dim in range(len(region.shape)):
        start, end = rest.offsets[dim], rest.offsets[dim] + rest.shape[dim]
        low, high = common.offsets[dim], common.offsets[dim] + common.shape[dim]
        parts += [rest.narrow(dim, a, b) for a, b in ((start, low), (high, end)) if a < b]
        rest = rest.narrow(dim, low, high)
    return parts


def _check_agreement(region: Region, of_tensor: Mapping[Region, list[int]], destination: int) -> None:
    if not of_tensor:
        raise CoverageError(f"{region.name}: receiver {destination} wants it, and no sender rank holds any of it")
    for have, ranks in of_tensor.items():
        if (have.dtype, have.global_shape) != (region.dtype, region.global_shape):
            raise CoverageError(
                f"{region.name}: receiver {destination} wants {region.dtype} {list(region.global_shape)}, sender rank "
                f"{ranks[0]} holds {have.dtype} {list(have.global_shape)}"
            )
