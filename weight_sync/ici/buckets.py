"""Regions of tensors in flat memory, and the buckets in which they travel: few long messages instead of many short."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weight_sync.ici.links import Group
from weight_sync.manifest import ALIGNMENT_BYTES, aligned
from weight_sync.portions import batches
from weight_sync.sender import Region

WINDOW = 2
"""Messages in flight per peer: one travels while the next is packed or the last unpacked."""


class FlatRegions:
    """Regions one after another in one flat buffer, each row-major and aligned.

    ``alignment_bytes`` 1 leaves no gaps; the caller then orders them so that every dtype lies right.
    """

    def __init__(self, regions: Iterable[Region], alignment_bytes: int = ALIGNMENT_BYTES):
        self._offsets: dict[Region, int] = {}
        self._of_tensor: dict[str, list[Region]] = defaultdict(list)
        self.nbytes = 0
        for region in regions:
            self._offsets[region] = self.nbytes
            self._of_tensor[region.name].append(region)
            self.nbytes += aligned(region.nbytes, alignment_bytes)
        self.data: torch.Tensor | None = None
        """[nbytes] uint8, after `allocate`."""

    def allocate(self, device: torch.device) -> None:
        self.data = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)  # and touched

    def view(self, part: Region) -> torch.Tensor:
        """The elements of ``part``, which lies in one of the regions."""
        for region in self._of_tensor[part.name]:
            starts = [a - b for a, b in zip(part.offsets, region.offsets, strict=True)]
            if all(a >= 0 and a + n <= m for a, n, m in zip(starts, part.shape, region.shape, strict=True)):
                offset = self._offsets[region]
                whole = self.data[offset : offset + region.nbytes].view(region.dtype).view(region.shape)
                for dim, (start, size) in enumerate(zip(starts, part.shape, strict=True)):
                    whole = whole.narrow(dim, start, size)
                return whole
        raise KeyError(f"{part.name} {part}")

    def bytes_of(self, part: Region) -> torch.Tensor:
        """[bytes] uint8: the bytes of a part that lies in one piece, such as a region."""
        return self.view(part).reshape(-1).view(torch.uint8) if part.size else self.data[:0]

    def run(self, bucket: Bucket) -> torch.Tensor | None:
        """[bytes] uint8: where the bucket lies in ``data`` as it would be packed; None if it does not."""
        views = [self.view(part) for part in bucket.parts]
        starts = [view.data_ptr() - self.data.data_ptr() for view in views]
        # Between whole regions there is only padding, but between parts of them there may be other parts.
        alone = len(views) == 1 and views[0].is_contiguous()
        whole = all(self._offsets.get(part) == start for part, start in zip(bucket.parts, starts, strict=True))
        if not alone and not (whole and [start - starts[0] for start in starts] == list(bucket.offsets)):
            return None
        return self.data[starts[0] : starts[0] + bucket.nbytes]


@dataclass(frozen=True)
class Bucket:
    """Parts that travel in one message, and where each lies in it."""

    parts: tuple[Region, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, parts: Sequence[Region]) -> Bucket:
        offsets, end = [], 0
        for part in parts:
            offsets.append(aligned(end))
            end = offsets[-1] + part.nbytes
        return cls(tuple(parts), tuple(offsets), end)

    def pieces(self, message: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
        """Every part with its bytes in a message."""
        for part, offset in zip(self.parts, self.offsets, strict=True):
            yield part, message[offset : offset + part.nbytes]


def cut_buckets(parts: Iterable[Region], bucket_bytes: int, bucket_tensors: int | None = None) -> list[Bucket]:
    """Buckets of consecutive parts, none above ``bucket_bytes`` or ``bucket_tensors``; larger parts are cut up first."""
    buckets: list[Bucket] = []
    for batch in batches(parts, bucket_bytes, bucket_tensors, aligned):
        if batch[0].nbytes > bucket_bytes:
            buckets += [Bucket.of([piece]) for piece in _cut_up(batch[0], bucket_bytes)]
        else:
            buckets.append(Bucket.of(batch))
    return buckets


def _cut_up(part: Region, nbytes: int) -> Iterator[Region]:
    """Slices along the first dimension that has any, each of ``nbytes`` at most where elements allow it."""
    dim = next((dim for dim, size in enumerate(part.shape) if size > 1), None)
    if part.nbytes <= nbytes or dim is None:
        yield part
        return
    row = part.nbytes // part.shape[dim]
    rows = max(1, nbytes // row)
    first, end = part.offsets[dim], part.offsets[dim] + part.shape[dim]
    for start in range(first, end, rows):
        yield from _cut_up(part.narrow(dim, start, min(start + rows, end)), nbytes)


class Staging:
    """Reusable buffers for messages that lie nowhere in one piece."""

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        fitting = next((index for index, buffer in enumerate(self._free) if buffer.numel() >= nbytes), None)
        if fitting is not None:
            return self._free.pop(fitting)
        if self._free:
            self._free.pop()  # make room for the larger one
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


def interleave(buckets: Mapping[int, Sequence[Bucket]]) -> list[tuple[int, Bucket]]:
    """(peer, bucket) of all peers in turn. Both ends go in this order, so that no two ranks wait for each other."""
    longest = max(map(len, buckets.values()), default=0)
    return [(peer, of[index]) for index in range(longest) for peer, of in sorted(buckets.items()) if index < len(of)]


Observer = Callable[[int, Bucket, torch.Tensor], None]
"""Sees (peer, bucket, message) of what is sent or was received."""


def ignore(peer: int, bucket: Bucket, message: torch.Tensor) -> None: ...


def send_buckets(
    group: Group, buckets: Mapping[int, Sequence[Bucket]], source: FlatRegions, staging: Staging, see: Observer = ignore
) -> None:
    """Send every peer (rank of the group) its buckets of ``source``. Raises RuntimeError if one does not take them."""
    flying: deque = deque()

    def finish() -> None:
        work, buffer = flying.popleft()
        work.wait()
        if buffer is not None:
            staging.give(buffer)

    for peer, bucket in interleave(buckets):
        if len(flying) >= WINDOW * len(buckets):
            finish()
        message, buffer = source.run(bucket), None
        if message is None:
            buffer = staging.take(bucket.nbytes)
            message = buffer[: bucket.nbytes]
            for part, piece in bucket.pieces(message):
                piece.view(part.dtype).view(part.shape).copy_(source.view(part))
        see(peer, bucket, message)
        flying.append((group.send(message, peer), buffer))
    while flying:
        finish()


def receive_buckets(
    group: Group, buckets: Mapping[int, Sequence[Bucket]], target: FlatRegions, staging: Staging, see: Observer = ignore
) -> None:
    """Receive from every peer (rank of the group) its buckets into ``target``. Raises RuntimeError if one stays away."""
    flying: deque = deque()

    def finish() -> None:
        peer, bucket, work, message, buffer = flying.popleft()
        work.wait()
        if buffer is not None:
            for part, piece in bucket.pieces(message):
                target.view(part).copy_(piece.view(part.dtype).view(part.shape))
        see(peer, bucket, message)
        if buffer is not None:
            staging.give(buffer)

    for peer, bucket in interleave(buckets):
        if len(flying) >= WINDOW * len(buckets):
            finish()
        message, buffer = target.run(bucket), None
        if message is None:
            buffer = staging.take(bucket.nbytes)
            message = buffer[: bucket.nbytes]
        flying.append((peer, bucket, group.receive(message, peer), message, buffer))
    while flying:
        finish()
