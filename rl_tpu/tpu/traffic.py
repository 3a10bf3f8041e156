"""Memory traffic and collectives of a compiled program, from the text of what XLA's compiler made of it.

XLA's own analysis takes the body of a loop once. Here everything counts as often as the loops around it run. Bytes accessed
are an estimate:

- what stands outside fusions reads its operands and writes its results, once each, in the device's memory alone: what the
  compiler keeps in a TPU's vector memory costs nothing. A matrix product that reads its tiles again costs more than that.
- slices, gathers and updates of a part cost that part, except for gathers on sparse cores, which count with their whole
  operand. XLA updates in place, also where a fusion ends with it.
- a kernel costs what it says of itself (Pallas' cost estimate), where it says something.
- padding to tiles is not counted; of a conditional every branch is; a loop without a constant end runs once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rl_tpu.tpu.hlo import Computation, Instruction, Module, parse

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"}
COLLECTIVES |= {"collective-permute", "collective-broadcast"}
_CONTROL = {"while", "call", "conditional"}
"""Cost what they run."""
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain"}
_FREE |= {"opt-barrier", "partition-id", "replica-id"} | _CONTROL
_SLICES = {"dynamic-slice", "slice", "gather"}
"""They read as much of their first operand as they return."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""They write as much of their first operand as this operand has."""
_ELEMENTWISE = {"bitcast", "copy", "convert", "reshape", "transpose"}
_ESTIMATE = re.compile(r'"bytes_accessed":\s*"?(\d+)')


@dataclass(frozen=True)
class Traffic:
    """Of one device, for one run of a program."""

    bytes_accessed: float | None
    """Read from and written to the device's memory; None where it could not be told."""
    collectives: dict[str, tuple[int, int]]
    """Kind to how many, and how many bytes in all: of each the larger of what goes in and what comes out."""


def count_traffic(text: str) -> Traffic:
    """Of the program in `text`, an optimized HLO module. Raises ValueError where it is none."""
    module = parse(text)
    moved, counts, sizes = 0.0, Counter(), Counter()
    for instruction, times, part in _executed(module, module.entry):
        if not part:
            moved += times * _bytes(module, instruction)
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts[kind] += times
            sizes[kind] += times * _exchanged(instruction)
    return Traffic(moved, {kind: (counts[kind], sizes[kind]) for kind in counts})


def _executed(
    module: Module, computation: Computation, times: int = 1, part: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """Every instruction, how often it runs, and whether it is part of another: of a fusion, or of what runs beside."""
    for instruction in computation.instructions.values():
        yield instruction, times, part
        rounds = module.rounds(instruction) if instruction.opcode == "while" else 1
        for name in instruction.called:
            inner = part or instruction.opcode not in _CONTROL
            yield from _executed(module, module.computations[name], times * rounds, inner)


def _exchanged(collective: Instruction) -> int:
    given = sum(array.bytes for operand in collective.operands for array in operand.arrays)
    returned = sum(array.bytes for array in collective.arrays)
    if collective.opcode.endswith("-start"):  # returns what it was given beside the result
        returned -= given
    return max(given, returned)


def _bytes(module: Module, instruction: Instruction) -> float:
    opcode = instruction.opcode
    if opcode in _FREE or '"AllocateBuffer"' in instruction.attributes:
        return 0.0
    if opcode == "custom-call" and (estimate := _ESTIMATE.search(instruction.attributes)):
        return float(estimate[1])
    total = 0.0
    if not opcode.endswith("-done"):
        for place, operand in enumerate(instruction.operands):
            whole = sum(array.bytes for array in operand.arrays if array.space == 0)
            if whole and not operand.opcode.endswith(("-start", "-update")):
                total += whole * min(1.0, _read(module, instruction, place) / operand.elements)
    if not opcode.endswith(("-start", "-update")):
        for array, written in zip(instruction.arrays, _written(module, instruction), strict=True):
            if array.space == 0 and array.elements:
                total += array.bytes * min(1.0, written / array.elements)
    return total


def _read(module: Module, instruction: Instruction, place: int) -> int:
    """Elements that an instruction reads of an operand."""
    operand, opcode = instruction.operands[place], instruction.opcode.removesuffix("-start")
    if place == 0 and opcode in _SLICES:
        # What starts one returns its operands first.
        return instruction.arrays[len(instruction.operands) if opcode != instruction.opcode else 0].elements
    if place == 0 and opcode in _UPDATES:
        return 0 if opcode == "dynamic-update-slice" else instruction.operands[_UPDATES[opcode]].elements
    if opcode == "fusion" or (opcode == "async" and instruction.operands):
        return _needed(module, module.computations[instruction.called[0]].parameter(place))
    return operand.elements


def _needed(module: Module, value: Instruction) -> int:
    """Elements of a fusion's parameter that the fusion reads."""
    total = 0 if value.users else value.elements
    for user, place in value.users:
        read = _read(module, user, place)
        passes = user.opcode in _ELEMENTWISE or (user.opcode == "fusion" and len(user.operands) == 1)
        if passes and user.users and user.elements == value.elements:
            read = min(read, _needed(module, user))
        total += read
    return min(total, value.elements)


def _written(module: Module, instruction: Instruction, part: bool = False) -> list[int]:
    """Elements that an instruction writes of every array that it returns."""
    if instruction.opcode == "fusion":
        root = module.computations[instruction.called[0]].root
        results = root.operands if root.opcode == "tuple" else (root,)
        return [count for result in results for count in _written(module, _origin(result), part=True)]
    place = _UPDATES.get(instruction.opcode)
    # What a fusion makes itself and then updates is written whole.
    if place is not None and not (part and _origin(instruction.operands[0]).opcode == "broadcast"):
        return [instruction.operands[place].elements]
    return [array.elements for array in instruction.arrays]


def _origin(value: Instruction) -> Instruction:
    """What a value is but for its layout and type."""
    while value.opcode in _ELEMENTWISE:
        value = value.operands[0]
    return value
