"""Which programs a rank had to capture or compile, how many it may, and how many were kept from earlier runs."""

from __future__ import annotations

from rl_tpu.devices import Device
from rl_tpu.errors import RunError


class Compilations:
    """Programs by name and shape. On a device that compiles one program per shape every new one costs minutes, so that a
    run has all of them after its first steps.

    Args:
        limit: so many programs are allowed; None: any number.
    """

    def __init__(self, limit: int | None):
        self._limit = limit
        self._made: list[str] = []
        self._reported = 0

    def need(self, program: str, rows: int | None = None, row_tokens: int | None = None) -> None:
        """This program is about to be used. Raises RunError where it is a new one and one too many."""
        name = program if rows is None else f"{program} of {rows} x {row_tokens} tokens"
        if name in self._made:
            return
        if self._limit is not None and len(self._made) >= self._limit:
            raise RunError(
                f"{name} would be program {len(self._made) + 1}, trainer.execution.max_compilations is {self._limit}; so far:"
                f" {', '.join(self._made)}. Allow more, or fewer lengths in trainer.row_tokens"
            )
        self._made.append(name)

    def since_last(self) -> int:
        """How many were new since this was last asked."""
        new, self._reported = len(self._made) - self._reported, len(self._made)
        return new


class KeptPrograms:
    """Programs that the device's compiler made, and that it found in its directory (`trainer.execution.cache`)."""

    def __init__(self, device: Device):
        self._device = device
        self._reported = device.programs()

    def since_last(self) -> dict[str, float]:
        """`cache_misses` and, where the compiler tells, `cache_hits`, since this was last asked."""
        before, self._reported = self._reported, self._device.programs()
        return {name: float(count - before[name]) for name, count in self._reported.items()}
