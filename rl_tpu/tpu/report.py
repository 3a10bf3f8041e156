"""What is known of one compiled program: the figures of the compiler, for one device. Needs no accelerator package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROGRAM_NAMES = ("logprobs", "reference", "backward", "update")
"""Programs of one training step. `backward` is a micro-batch forward and backward; `update` clips and updates."""


@dataclass(frozen=True)
class CompiledProgram:
    """One program at one row length, compiled ahead of time. Bytes, flops and seconds are those of one device.

    The figures of memory, cost and time are None where the compiler gave none: where it refused, all of them.
    """

    name: str
    """One of `PROGRAM_NAMES`."""
    rows: int
    """Packed rows of the micro-batch, over all data ranks (0 for `update`)."""
    row_tokens: int | None
    """Tokens of a packed row; None for `update`, which has no rows."""
    error: str | None
    """The compiler's own message, shortened; None where it compiled."""
    compile_s: float
    """Seconds the compiler took, also where the result came from the cache now."""
    cached: bool
    """Whether this result came from the cache."""
    argument_bytes: int | None
    """Parameters, optimizer state and rows that the program is called with."""
    temporary_bytes: int | None
    """What it needs besides arguments and outputs while it runs: activations above all."""
    output_bytes: int | None
    """What it returns."""
    alias_bytes: int | None
    """Part of the outputs that takes the place of donated arguments."""
    total_bytes: int | None
    """argument + temporary + output - alias."""
    limit_bytes: int
    """Memory of one device that a program may use."""
    flops: float | None
    """Floating-point operations of matrix products, by the captured graph, what is computed again included."""
    bytes_accessed: float | None
    """Bytes read from and written to the device's large memory, an estimate from the compiler's text."""
    collectives: dict[str, tuple[int, int]]
    """Kind of collective (`all-gather`, ...) to how many and how many bytes in all."""
    compute_s: float | None
    """`flops` at the chip's peak."""
    memory_s: float | None
    """`bytes_accessed` at the chip's peak bandwidth."""
    compiler_flags: tuple[str, ...]
    """What it had to be told to compile this; a run on TPUs needs the same in LIBTPU_INIT_ARGS."""
    program_hash: str
    """Of program, topology and versions: the key of the cache."""

    @property
    def label(self) -> str:
        """Name and row length, as tables show it."""
        return self.name if self.row_tokens is None else f"{self.name} {self.rows}x{self.row_tokens}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompiledProgram:
        """What `to_json` gave. Raises TypeError for other fields."""
        collectives = {kind: (int(count), int(size)) for kind, (count, size) in values["collectives"].items()}
        return cls(**{**values, "collectives": collectives, "compiler_flags": tuple(values["compiler_flags"])})
