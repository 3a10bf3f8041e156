"""The text of a program as XLA's compiler leaves it (optimized HLO): computations, their instructions, and who uses whom."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|called_computations|\w+_computation)=(\{[^}]*\}|%\S+)"
)
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def written_to(directory: str | Path) -> dict[str, str | bool]:
    """Compiler options with which libtpu writes what it makes of a program into a directory that holds no other program.

    JAX's `as_text` goes through jaxlib, which cannot read what a newer libtpu makes for sparse cores (jaxlib 0.10.2)."""
    return {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}


def text_in(directory: str | Path) -> str:
    """The optimized program that was `written_to` this directory. Raises ValueError where there is not exactly one."""
    (path,) = Path(directory).glob("*.after_codegen.txt")
    return path.read_text()


@dataclass(frozen=True)
class Array:
    elements: int
    bits: int
    """Of one element."""
    space: int
    """Which memory the compiler chose: 0 is the device's large one, 1 a TPU's vector memory."""

    @property
    def bytes(self) -> int:
        return self.elements * self.bits // 8


@dataclass(frozen=True, eq=False)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[Instruction, ...]
    called: tuple[str, ...]
    """Computations that it runs; of a loop the body alone."""
    inside: str
    """What is in the parentheses behind the opcode: a constant's value, a parameter's number."""
    attributes: str
    """The rest of the line."""
    users: list[tuple[Instruction, int]] = field(default_factory=list)
    """Whoever takes this as an operand, and as which."""

    @cached_property
    def arrays(self) -> list[Array]:
        """What it returns, those in tuples one after the other."""
        found = _ARRAY.finditer(self.type)
        return [
            Array(math.prod(int(size) for size in each[3].split(",") if size), int(each[2] or 8), int(each[4] or 0))
            for each in found
        ]

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.arrays)


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)
    """In the order of the text, operands first."""
    root: Instruction | None = None

    def parameter(self, number: int) -> Instruction:
        parameters = (each for each in self.instructions.values() if each.opcode == "parameter")
        return next(each for each in parameters if int(each.inside) == number)


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def rounds(self, loop: Instruction) -> int:
        """How often a `while` runs its body: as the compiler says, or up to the largest whole number in its condition, as
        JAX counts from 0 by 1 (a TPU compares the upper half of 64 bits with 0 first); 1 where neither is there."""
        if known := _KNOWN_TRIPS.search(loop.attributes):
            return int(known[1])
        condition = self.computations[_CONDITION.search(loop.attributes)[1]].instructions.values()
        whole = (each for each in condition if each.opcode == "constant" and re.match(r"[su]\d", each.type))
        return max((int(each.inside) for each in whole), default=1)


def parse(text: str) -> Module:
    """Of an HLO module's text. Raises ValueError where it is none."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if found := _HEADER.match(line):
            current = computations[found[2]] = Computation()
            entry = current if found[1] else entry
        elif current and (found := _INSTRUCTION.match(line)):
            _add(current, *found.groups())
    if entry is None:
        raise ValueError("this is not the text of an HLO module: no line begins with ENTRY")
    return Module(computations, entry)


def _add(computation: Computation, root: str | None, name: str, text: str) -> None:
    end = _closed(text, 0) if text.startswith("(") else text.index(" ")
    kind, text = text[:end], text[end:].lstrip()
    opens = text.index("(")
    closes = _closed(text, opens)
    inside, attributes = text[opens + 1 : closes - 1], text[closes:]
    known = computation.instructions
    operands = tuple(known[each] for each in _NAME.findall(inside) if each in known)
    called = tuple(each for found in _CALLED.findall(attributes) for each in _NAME.findall(found))
    instruction = known[name] = Instruction(name, kind, text[:opens], operands, called, inside, attributes)
    for place, operand in enumerate(operands):
        operand.users.append((instruction, place))
    if root:
        computation.root = instruction


def _closed(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"a parenthesis has no end: {text[start : start + 80]}")
