"""What a rank holds of the policy: regions of global tensors, cut from whole tensors, DTensors or anything else."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

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
        if self.data.layout is not torch.strided or self.data.is_quantized:
            raise WeightSyncError(
                f"{self.name}: only dense tensors can be sent, not {self.data.layout} of {self.data.dtype}"
            )
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
        object.__setattr__(self, "data", self.data.resolve_conj().resolve_neg())  # else its bytes are not its values

    @classmethod
    def whole(cls, name: str, data: torch.Tensor, dtype: torch.dtype | None = None) -> Shard:
        """A tensor this rank holds all of."""
        return cls(name, tuple(data.shape), (0,) * data.dim(), data, dtype)


def local_shards(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> list[Shard]:
    """This rank's part of ``tensor``: all of a plain tensor; of a DTensor (FSDP2, TP, both) the region that lies here,
    or none; several where its local values are no rectangle of the whole (a DTensor that was reshaped).

    Raises WeightSyncError for a DTensor whose local values are partial sums.
    """
    if not isinstance(tensor, DTensor):
        return [Shard.whole(name, tensor, dtype)]
    if any(placement.is_partial() for placement in tensor.placements):
        raise WeightSyncError(
            f"{name}: a DTensor of partial sums {tensor.placements} must be reduced before it is sent"
        )
    local = tensor.to_local()
    if tensor.device_mesh.get_coordinate() is None or (tensor.numel() and not local.numel()):
        return []
    held = [_held(tensor, dim) for dim in range(tensor.dim())]
    if [sum(map(len, runs)) for runs in held] != list(local.shape):
        raise WeightSyncError(
            f"{name}: a local tensor of shape {list(local.shape)} is not what placements {tensor.placements} on a mesh "
            f"of {tuple(tensor.device_mesh.shape)} leave of {list(tensor.shape)}"
        )
    ends = [itertools.accumulate(map(len, runs)) for runs in held]
    located = [list(zip(of_dim, runs, strict=True)) for of_dim, runs in zip(ends, held, strict=True)]
    return [
        Shard(
            name,
            tuple(tensor.shape),
            tuple(run.start for _, run in region),
            local[tuple(slice(end - len(run), end) for end, run in region)],
            dtype,
        )
        for region in itertools.product(*located)
    ]


def _held(tensor: DTensor, dim: int) -> list[range]:
    """Indices along ``dim`` of the whole tensor that this rank holds, as runs in the order of its local tensor.

    torch's own ``compute_local_shape_and_global_offset`` knows the first index only, and a wrong one where FSDP2 splits
    unevenly what tensor parallelism left.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    runs = [range(tensor.shape[dim])]
    for mesh_dim, pieces in _cuts(tensor, dim):
        parts, part = mesh.size(mesh_dim), coordinate[mesh_dim]
        runs = [run for piece in _chunks(runs, pieces) for run in _chunks(piece, parts)[part]]
    return runs or [range(0)]


def _cuts(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    """The mesh dimensions that shard ``dim``, in turn; each takes its part of so many pieces.

    A strided placement whose factor is the number of shards made by mesh dimensions to its right comes after those: so
    FSDP2 says that it shards what tensor parallelism left. Any other takes a part of every piece (a reshaped DTensor).
    """
    factors = {
        mesh_dim: getattr(placement, "split_factor", 1)
        for mesh_dim, placement in enumerate(tensor.placements)
        if getattr(placement, "dim", None) == dim
    }
    in_turn: list[int] = []
    for mesh_dim, factor in reversed(factors.items()):
        shards = list(itertools.accumulate(map(tensor.device_mesh.size, in_turn), operator.mul, initial=1))
        if factor not in shards:
            return list(factors.items())
        in_turn.insert(shards.index(factor), mesh_dim)
    return [(mesh_dim, 1) for mesh_dim in in_turn]


def _chunks(runs: list[range], parts: int) -> list[list[range]]:
    """As ``torch.chunk`` of the indices one after the other, but always so many parts: the last ones may be empty."""
    size = -(-sum(map(len, runs)) // parts)
    return [_between(runs, part * size, (part + 1) * size) for part in range(parts)]


def _between(runs: list[range], begin: int, end: int) -> list[range]:
    kept = []
    for run in runs:
        if part := run[max(begin, 0) : max(end, 0)]:
            kept.append(part)
        begin, end = begin - len(run), end - len(run)
    return kept
