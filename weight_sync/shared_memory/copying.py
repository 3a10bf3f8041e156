"""Copies into shared memory at the speed of memory; a tensor is hashed while its bytes are still in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from weight_sync.hashing import in_threads

CACHED_BYTES = 1 << 20
"""A piece of this size stays in its core's cache between hash and copy, and makes the interpreter's part small."""
PIECE_BYTES = 64 << 20
"""Copies without a hash are shared out in pieces of this size."""


class Copy(NamedTuple):
    """``source`` (any device, dtype, strides) goes to ``target`` of the same shape in shared memory.

    ``to_hash``: the target is all of tensor ``name``, and its hash is wanted.
    """

    name: str
    target: torch.Tensor
    source: torch.Tensor
    to_hash: bool


def copy_tensors(copies: list[Copy], threads: int) -> dict[str, str]:
    """Do all copies, best the largest first. Returns the xxh3-128 of the tensors that were hashed on the way.

    One thread hashes one tensor. A tensor so large that the other threads would wait for it is copied by all of them in
    pieces instead, and left for the caller to hash.
    """
    fair_share = sum(copy.target.nbytes for copy in copies) / threads
    hashed: dict[str, str] = {}

    def copy_and_hash(copy: Copy) -> None:
        hashed[copy.name] = _copy_and_hash(copy.target, copy.source)

    work = []
    for copy in copies:
        if copy.to_hash and copy.target.nbytes <= fair_share:
            work.append(partial(copy_and_hash, copy))
        else:
            work.extend(partial(_copy, *piece) for piece in _pieces(copy.target, copy.source, PIECE_BYTES))
    in_threads(lambda step: step(), work, threads)
    return hashed


def _copy(target: torch.Tensor | np.ndarray, source: torch.Tensor | np.ndarray) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source)


def _copy_and_hash(target: torch.Tensor, source: torch.Tensor) -> str:
    """The hash is of the bytes that are sent: the source's where they go as they are, which is faster than reading them
    again where they were written, and then a byte that changes in between is refused by the receiver."""
    hasher = xxhash.xxh3_128()
    for piece, values in _pieces(target, source, CACHED_BYTES):
        if isinstance(values, np.ndarray):
            hasher.update(values)
            np.copyto(piece, values)
        else:
            piece.copy_(values)
            hasher.update(bytes_of(piece))
    return hasher.hexdigest()


def _pieces(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[tuple]:
    """The copy cut along its first dimension, in order, into copies of about ``nbytes``. They are NumPy's where bytes
    go as they are: its copy is memcpy, faster than torch's."""
    if not source.is_cpu:
        yield target, source  # one transfer from a device beats many
        return
    if source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous():
        target, source = bytes_of(target), bytes_of(source)
    elif target.dim() == 0:
        target, source = target.view(1), source.view(1)
    rows = max(1, nbytes * len(target) // max(1, target.nbytes))
    for start in range(0, len(target), rows):
        yield target[start : start + rows], source[start : start + rows]


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, not a copy."""
    return tensor.view(-1).view(torch.uint8).numpy()
