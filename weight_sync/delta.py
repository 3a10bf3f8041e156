"""What changed in a tensor's bytes, small: XOR with the previous bytes, split into byte planes, zstd.

A small update changes few weights, and of those the low bits of the mantissa: the XOR of old and new is zero in most
bytes, and zero nearly everywhere in the planes of the high bytes. XOR is exact for any dtype and any bits, NaNs
included. After AdamW steps at a learning rate of 1e-6, 2 to 4 % of bf16 weights change; this packs them into about the
same share of their bytes, smaller than a compressed list of positions and values, and 25 times smaller than the changed
tensors compressed.
"""

from __future__ import annotations

import numpy
import torch
import zstandard

from weight_sync.errors import WeightSyncError


def encode(previous: torch.Tensor, new: torch.Tensor, itemsize: int, level: int = 1) -> bytes | None:
    """The delta between two versions of a tensor [bytes] uint8 with elements of ``itemsize`` bytes; None if equal."""
    if torch.equal(previous, new):
        return None
    xor = numpy.bitwise_xor(previous.numpy(), new.numpy())
    planes = numpy.ascontiguousarray(xor.reshape(-1, itemsize).T)  # numpy transposes bytes much faster than torch
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(planes.reshape(-1).data)


def apply(delta: torch.Tensor, base: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    """Write to ``target`` what ``encode`` made the ``delta`` of, given its ``base``; all [bytes] uint8. ``target`` may
    be ``base``.

    Raises WeightSyncError if the delta is damaged in a way that shows here; others show in the hash of ``target``.
    """
    planes = numpy.empty((itemsize, len(base) // itemsize), dtype=numpy.uint8)
    room = memoryview(planes.reshape(-1))
    try:
        with zstandard.ZstdDecompressor().stream_reader(delta.numpy().data) as reader:
            while room:
                count = reader.readinto(room)
                if not count:
                    raise WeightSyncError(f"a delta ends {len(room)} bytes early")
                room = room[count:]
            if reader.read(1):  # reading on to the end also checks the frame's own checksum
                raise WeightSyncError(f"a delta has more than {len(base)} bytes")
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"a delta cannot be unpacked: {error}") from error
    before, after = (tensor.numpy().reshape(-1, itemsize) for tensor in (base, target))
    for byte, plane in enumerate(planes):
        numpy.bitwise_xor(before[:, byte], plane, out=after[:, byte])
