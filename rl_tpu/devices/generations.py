"""Generations of Cloud TPUs: what a chip holds and does, and the shapes that chips of one slice are wired in.

Sources, read in 2026: the vendor's pages docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} for chips per VM, HBM, peaks
and slice shapes (older copies of them differ by up to 3 % in HBM bandwidth); ICI of v4 is 6 links of 90 GB/s, from the book
at jax-ml.github.io/scaling-book; shapes within one host are those torch_tpu 0.2.0 tabulates (`utils/hardware.py`), where
v5e and v6e have none of two chips. Peaks are what the vendor promises, not what a program reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_tpu.errors import UserError

GIB = 2**30
LARGEST_SLICE = {2: 256, 3: 2048}
"""Chips of the largest slice this module gives a shape for, by dimensions of the torus."""


@dataclass(frozen=True)
class Generation:
    """One generation. Bytes and FLOPs of the fields are per chip and per second; those of the properties per device."""

    name: str
    """How `cluster.generation` and people call it."""
    libtpu_name: str
    """How libtpu's topologies call it."""
    chips_per_vm: tuple[int, ...]
    """Chips a virtual machine can have."""
    devices_per_chip: int
    """Devices torch and JAX see in one chip; one process each in torch."""
    hbm_gib_per_chip: int
    bf16_flops_per_chip: float
    """Peak of dense matrix products, FLOP/s."""
    hbm_bytes_per_s_per_chip: float
    ici_bytes_per_s_per_chip: float
    """Of all links of a chip together, both ways."""
    torus_dimensions: int

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device. The compiler grants about 1 % less."""
        return self.hbm_gib_per_chip * GIB // self.devices_per_chip

    @property
    def peak_flops(self) -> float:
        """bf16 FLOP/s of one device."""
        return self.bf16_flops_per_chip / self.devices_per_chip

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s between one device and its memory."""
        return self.hbm_bytes_per_s_per_chip / self.devices_per_chip

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """Numbers of chips that form a slice, ascending."""
        sizes = (2**exponent for exponent in range(LARGEST_SLICE[self.torus_dimensions].bit_length()))
        return tuple(size for size in sizes if size != 2 or self.torus_dimensions == 3)

    def shape(self, chips: int) -> tuple[int, int, int]:
        """(x, y, z) of the slice that so many chips form: cubes first, what is over goes to the last dimensions.

        Raises:
            UserError: so many chips form none.
        """
        if chips not in self.slice_sizes:
            few = ", ".join(map(str, self.slice_sizes[:6]))
            raise UserError(
                f"{chips} chips of {self.name} form no slice; sizes that do are {few} and so on by factors of 2"
            )
        if self.torus_dimensions == 3 and chips <= 4:
            return {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)}[chips]  # a host's chips lie in one plane
        each, over = divmod(int(math.log2(chips)), self.torus_dimensions)
        dimensions = [each + (index >= self.torus_dimensions - over) for index in range(self.torus_dimensions)]
        return tuple([2**exponent for exponent in dimensions] + [1] * (3 - self.torus_dimensions))

    def topology(self, chips: int) -> str:
        """libtpu's name of the slice that so many chips form, for example `TPU7x:2x2x1` or `v6e:2x4`.

        Raises:
            UserError: so many chips form none.
        """
        return f"{self.libtpu_name}:" + "x".join(map(str, self.shape(chips)[: self.torus_dimensions]))


GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        # name, libtpu, chips per VM, devices per chip, GiB, FLOP/s, HBM bytes/s, ICI bytes/s, torus
        Generation("v4", "v4", (4,), 1, 32, 275e12, 1200e9, 540e9, 3),
        Generation("v5e", "v5e", (1, 4, 8), 1, 16, 197e12, 819e9, 400e9, 2),
        Generation("v5p", "v5p", (4,), 1, 95, 459e12, 2765e9, 1200e9, 3),
        Generation("v6e", "v6e", (1, 4, 8), 1, 32, 918e12, 1640e9, 800e9, 2),
        Generation("v7x", "TPU7x", (4,), 2, 192, 2307e12, 7370e9, 1200e9, 3),
    )
}

_SPELLINGS = {
    "v7": "v7x",
    "tpu7x": "v7x",
    "tpuv7": "v7x",
    "tpuv7x": "v7x",
    "ironwood": "v7x",
    "trillium": "v6e",
    "tpuv6e": "v6e",
    "tpuv6lite": "v6e",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "tpuv5e": "v5e",
    "tpuv5lite": "v5e",
    "tpuv5p": "v5p",
    "tpuv5": "v5p",
    "tpuv4": "v4",
}
"""Other names of clouds, libraries and people, in lower case without spaces, hyphens and underscores."""


def get_generation(name: str) -> Generation:
    """The generation of that name in any usual spelling (`v7x`, `TPU7x`, `Ironwood`, `v5litepod`, `TPU v6 lite`).

    Raises:
        UserError: nobody calls a generation so.
    """
    plain = name.lower().translate(str.maketrans("", "", " -_"))
    known = GENERATIONS.get(_SPELLINGS.get(plain, plain))
    if known is None:
        raise UserError(f"cluster.generation: {name!r} is unknown; choose one of {', '.join(GENERATIONS)}")
    return known
