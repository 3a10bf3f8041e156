"""What changed in a tensor's bytes, small: XOR with the previous bytes, split into byte planes, zstd.

A small update changes few weights, and of those the low bits of the mantissa: the XOR of old and new is zero in most
bytes, and zero nearly everywhere in the planes of the high bytes. XOR is exact for any dtype and any bits, NaNs
included. After the first AdamW steps at a learning rate of 1e-6, 4 to 2 % of bf16 weights change; this packs them into
about the same share of their bytes, smaller than a compressed list of positions and values, and 25 times smaller than the
changed tensors compressed.

A tensor is packed in chunks that stay in the processor's cache and that threads share. Its delta is the length of each
chunk's frame (4 bytes, little-endian; 0: unchanged), then the frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch
import zstandard

from weight_sync.errors import WeightSyncError

CHUNK_BYTES = 2**20


def chunks(nbytes: int) -> Iterator[slice]:
    """The byte ranges in which a tensor of ``nbytes`` is packed."""
    return (slice(start, min(start + CHUNK_BYTES, nbytes)) for start in range(0, nbytes, CHUNK_BYTES))


def encode_chunk(previous: torch.Tensor, new: torch.Tensor, itemsize: int, level: int = 1) -> bytes:
    """The frame for a chunk [bytes] uint8 of elements of ``itemsize`` bytes; empty if nothing changed."""
    xor = numpy.bitwise_xor(previous.numpy(), new.numpy())
    if not xor.any():
        return b""
    planes = numpy.ascontiguousarray(xor.reshape(-1, itemsize).T)  # numpy transposes bytes much faster than torch
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(planes.reshape(-1).data)


def join(frames: Sequence[bytes]) -> bytes | None:
    """The delta of a tensor from the frames of all its chunks; None if nothing changed."""
    if not any(frames):
        return None
    return numpy.array([len(frame) for frame in frames], dtype="<u4").tobytes() + b"".join(frames)


def split(delta: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """The frames in a delta [bytes] uint8 of a tensor of ``nbytes``. Raises WeightSyncError if there are others."""
    count = len(list(chunks(nbytes)))
    lengths = numpy.frombuffer(delta.numpy()[: 4 * count].tobytes().ljust(4 * count), dtype="<u4").tolist()
    if 4 * count + sum(lengths) != len(delta):
        raise WeightSyncError(f"a delta of {len(delta)} bytes says it has {4 * count + sum(lengths)}")
    return list(delta[4 * count :].split(lengths))


def apply_chunk(frame: torch.Tensor, base: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    """Write to ``target`` what ``encode_chunk`` made the ``frame`` of, given its ``base``; all [bytes] uint8.
    ``target`` may be ``base``.

    Raises WeightSyncError if the frame is damaged in a way that shows here; others show in the tensor's hash.
    """
    if not len(frame):
        target.copy_(base)
        return
    planes = numpy.empty((itemsize, len(base) // itemsize), dtype=numpy.uint8)
    room = memoryview(planes.reshape(-1))
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame.numpy().data) as reader:
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
