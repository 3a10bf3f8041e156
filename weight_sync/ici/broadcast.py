"""Whole tensors to everybody at once: the link for engines that take part in a broadcast from rank 0.

A message is one bucket of whole tensors without gaps between them, the way inference engines receive flattened buckets,
and a trailer: a uint8 tensor at its end with JSON that says which part of which version this is, and the tensors'
hashes. All sender ranks gather bucket i+1 on rank 0 while bucket i is being sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.ici.buckets import Bucket, FlatRegions, Staging, receive_buckets, send_buckets
from weight_sync.ici.links import Group
from weight_sync.ici.publication import Publication
from weight_sync.manifest import dtype_name
from weight_sync.plan import plan_transfers
from weight_sync.portions import batches
from weight_sync.sender import Region

TRAILER = "weight_sync.trailer"
"""Name of the last tensor of every message."""


@dataclass(frozen=True)
class Message:
    """One bucket: its tensors in the order in which they lie, and the bytes of the trailer."""

    regions: list[Region]
    trailer: bytes

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions) + len(self.trailer)

    def description(self) -> dict[str, list]:
        """``names``, ``dtypes`` and ``shapes`` of all tensors, the trailer last."""
        return {
            "names": [region.name for region in self.regions] + [TRAILER],
            "dtypes": [dtype_name(region.dtype) for region in self.regions] + ["uint8"],
            "shapes": [list(region.shape) for region in self.regions] + [[len(self.trailer)]],
        }


def messages(publication: Publication) -> list[Message]:
    """What is broadcast of a version, the same wherever it is computed."""
    hashes = {entry.name: entry.xxh3_128 for entry in publication.manifest.tensors}
    limits = publication.bucket_bytes, publication.bucket_tensors
    buckets = [_widest_first(batch) for batch in batches(publication.whole(), *limits)]

    def trailer(number: int, regions: list[Region]) -> bytes:
        fields: dict[str, Any] = {
            "version": publication.manifest.version,
            "bucket": number,
            "buckets": len(buckets),
            "xxh3_128": [hashes[region.name] for region in regions],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    return [Message(regions, trailer(number, regions)) for number, regions in enumerate(buckets)]


def _widest_first(regions: list[Region]) -> list[Region]:
    """So ordered, regions without gaps between them all lie at multiples of their dtype's size."""
    return sorted(regions, key=lambda region: -region.dtype.itemsize)


def send_broadcast(
    group: Group | None, gather: Group | None, rank: int, publication: Publication, staging: Staging
) -> None:
    """Sender rank ``rank``'s part in sending a version: rank 0 has the ``group``, all ranks ``gather`` among them.

    Raises RuntimeError if a rank does not take part.
    """
    todo = messages(publication)
    parts: dict[str, list[tuple[int, Region]]] = {}
    for transfer in plan_transfers(publication.held, [publication.whole()]):
        parts.setdefault(transfer.region.name, []).append((transfer.source, transfer.region))

    def of_rank(message: Message, source: int) -> list[Region]:
        return [part for region in message.regions for at, part in parts.get(region.name, []) if at == source]

    if rank != 0:
        buckets = [Bucket.of(mine) for message in todo if (mine := of_rank(message, rank))]
        send_buckets(gather, {0: buckets}, publication.flat, staging)
        return

    flying = None
    for message in todo:
        buffer = staging.take(message.nbytes)
        bucket = FlatRegions(message.regions, alignment_bytes=1)
        bucket.data = buffer[: bucket.nbytes]
        buffer[bucket.nbytes : message.nbytes].copy_(torch.frombuffer(bytearray(message.trailer), dtype=torch.uint8))
        for part in of_rank(message, 0):
            bucket.view(part).copy_(publication.flat.view(part))
        others = {
            source: [Bucket.of(theirs)]
            for source in range(1, len(publication.held))
            if (theirs := of_rank(message, source))
        }
        receive_buckets(gather, others, bucket, staging)
        if flying is not None:
            flying[0].wait()
            staging.give(flying[1])
        flying = group.broadcast(buffer[: message.nbytes]), buffer
    flying[0].wait()
    staging.give(flying[1])
