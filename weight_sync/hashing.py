"""xxh3-128 of tensors' bytes, and the threads that make hashing and copying run at memory speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import xxhash

from weight_sync.manifest import TensorEntry

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads(processes: int = 1) -> int:
    """Threads for each of ``processes`` that share this machine's cores; a handful saturates its memory."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // processes))


def in_threads(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """``[work(item) for item in items]`` in threads: copies and hashes of tensors release the interpreter lock."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def xxh3_128(data: torch.Tensor | bytes) -> str:
    """32 hex digits of bytes or a contiguous uint8 CPU tensor."""
    return xxhash.xxh3_128(data.numpy() if isinstance(data, torch.Tensor) else data).hexdigest()


def hash_entries(data: torch.Tensor, entries: Iterable[TensorEntry], threads: int) -> dict[str, str]:
    """Hash of each entry's bytes in ``data`` [bytes] uint8, by name; the largest first so that threads end together."""
    entries = sorted(entries, key=lambda entry: -entry.nbytes)
    hashes = in_threads(lambda entry: xxh3_128(data[entry.offset : entry.offset + entry.nbytes]), entries, threads)
    return {entry.name: value for entry, value in zip(entries, hashes, strict=True)}
