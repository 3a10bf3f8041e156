"""What a rank holds of the policy: regions of global tensors, cut from whole tensors, DTensors or anything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weight_sync.errors import WeightSyncError


@dataclass(frozen=True)
class Shard:
    """A rectangular region of a global tensor, held by this rank. A whole tensor has offsets 0 and its own shape.

    name          Hugging Face name of the tensor
    global_shape  shape of the whole tensor
    offsets       index of the region's first element in every dimension
    data          the region; any device and strides. It is copied straight to where the transport wants it, so
                  hand over views of live parameters rather than copies
    dtype         dtype to publish (default: the data's own); the conversion happens in that copy
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        shape, offsets, size = tuple(self.global_shape), tuple(self.offsets), tuple(self.data.shape)
        inside = len(shape) == len(offsets) == len(size) and all(
            start >= 0 and start + extent <= whole for start, extent, whole in zip(offsets, size, shape, strict=True)
        )
        if not inside:
            raise WeightSyncError(
                f"{self.name}: a region of shape {list(size)} at {list(offsets)} does not lie in a tensor of shape "
                f"{list(shape)}"
            )
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "dtype", self.dtype or self.data.dtype)

    @classmethod
    def whole(cls, name: str, data: torch.Tensor, dtype: torch.dtype | None = None) -> Shard:
        """A tensor this rank holds all of."""
        return cls(name, tuple(data.shape), (0,) * data.dim(), data, dtype)


def local_shards(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> list[Shard]:
    """This rank's part of ``tensor``: all of a plain tensor, the local region of a DTensor (FSDP2, TP, both), nothing
    where a DTensor has no element on this rank.

    Raises WeightSyncError for a DTensor whose local values are partial sums.
    """
    if not isinstance(tensor, DTensor):
        return [Shard.whole(name, tensor, dtype)]
    if any(placement.is_partial() for placement in tensor.placements):
        raise WeightSyncError(
            f"{name}: a DTensor of partial sums {tensor.placements} must be reduced before it is sent"
        )
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    return [Shard(name, tuple(tensor.shape), tuple(offsets), local, dtype)] if local.numel() else []
