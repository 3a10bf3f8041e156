"""What can go wrong between a sender and a receiver. Every message names the tensor, rank or file it is about."""

from __future__ import annotations


class WeightSyncError(Exception):
    """A policy could not be sent or received. Nothing of it may be served."""


def require_positive(**options: float | None) -> None:
    """Raises WeightSyncError, naming the option, for one that is no number above 0; None stands for a default."""
    for name, value in options.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise WeightSyncError(f"option {name} must be a number above 0, not {value!r}")


class CoverageError(WeightSyncError):
    """The shards of all ranks do not make up every tensor exactly once."""


class SpaceError(WeightSyncError):
    """The place the weights are written to is too small. The message has the numbers."""


class StaleHandleError(WeightSyncError):
    """The handle's weights are gone: their segment was removed, is being written, or holds another version by now."""


class VerificationError(WeightSyncError):
    """Bytes arrived that are not those that were sent. ``tensors`` are the names whose hashes differ."""

    def __init__(self, version: int, tensors: list[str]):
        super().__init__(version, tensors)  # both, so that the error survives pickling between processes
        self.version = version
        self.tensors = tensors

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:5]) + (", ..." if len(self.tensors) > 5 else "")
        return f"version {self.version}: xxh3-128 of {len(self.tensors)} tensor(s) differs from the manifest: {shown}"
