"""What changed in a tensor's bytes, small: XOR with the previous bytes, split into byte planes, zstd.

A small update changes the low bits of a weight's mantissa. The XOR of old and new is then zero in most bytes, and zero
nearly everywhere in the planes of the high bytes, which zstd packs at memory speed. XOR is exact for any dtype and any
bits, NaNs included, and needs no list of positions.
"""

from __future__ import annotations

import torch
import zstandard

from weight_sync.errors import WeightSyncError


def encode(previous: torch.Tensor, new: torch.Tensor, itemsize: int, level: int = 1) -> bytes | None:
    """The delta between two versions of a tensor [bytes] uint8 with elements of ``itemsize`` bytes; None if equal."""
    if torch.equal(previous, new):
        return None
    planes = torch.bitwise_xor(previous, new).view(-1, itemsize).t().contiguous()
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(planes.numpy().reshape(-1).data)


def apply(delta: bytes | torch.Tensor, base: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    """Write to ``target`` what ``encode`` made the delta of, given its ``base``; both [bytes] uint8, may be the same.

    Raises WeightSyncError if the delta is damaged in a way that shows here; others show in the hash of ``target``.
    """
    data = delta.numpy().data if isinstance(delta, torch.Tensor) else delta
    planes = torch.empty(itemsize, len(base) // itemsize, dtype=torch.uint8)
    room = memoryview(planes.numpy().reshape(-1))
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while room:
                count = reader.readinto(room)
                if not count:
                    raise WeightSyncError(f"a delta ends {len(room)} bytes early")
                room = room[count:]
            if reader.read(1):  # reading on to the end also checks the frame's own checksum
                raise WeightSyncError(f"a delta has more than {len(base)} bytes")
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"a delta cannot be unpacked: {error}") from error
    torch.bitwise_xor(base.view(-1, itemsize), planes.t(), out=target.view(-1, itemsize))
