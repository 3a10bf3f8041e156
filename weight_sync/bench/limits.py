"""What this machine can do at best with the same tensors: copying, touching, hashing, writing, sending them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from weight_sync.bench import processes
from weight_sync.bench.payload import DTYPE, Payload, PrivateShards, hold
from weight_sync.bench.processes import State, Worker, close_all, each, on_all
from weight_sync.bench.timing import make_row, repeated

MOST_BYTES = 2 * 10**9
"""Of a larger payload only its first tensors are used, so that memory suffices."""


def measure(
    payload: Payload, directory: Path, repeats: int, timeout_s: float, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for every limit. Raises WorkerError."""
    limits = {
        "memcpy, 1 thread": (memcpy, repeats, 1),
        "memcpy, 2 threads": (memcpy, repeats, 2),
        "memcpy, first touch": (first_touch, repeats),
        "xxh3-128, 1 thread": (hashing, repeats),
        "disk write and fsync": (disk_write, repeats, str(directory)),
        "gloo broadcast": (gloo_broadcast, repeats),
    }
    pair = [Worker("limits, rank 0"), Worker("limits, rank 1")]
    try:
        progress("starting processes")
        rendezvous = str(directory / "gloo-limits")
        each(pair, timeout_s, processes.join, [(rank, 2, rendezvous, timeout_s) for rank in range(2)])
        on_all(pair, timeout_s, hold, payload)
        warm_rate = None
        for name, (limit, *arguments) in limits.items():
            progress(name)
            workers = pair if limit is gloo_broadcast else pair[:1]
            nbytes, seconds = on_all(workers, timeout_s, limit, *arguments)[0]
            rounds = [{"total_s": taken} for taken in seconds]
            row = make_row("limit", name, nbytes, rounds, receivers=len(workers) - 1, memcpy_gb_per_s=warm_rate)
            warm_rate = warm_rate or row["gb_per_s"]
            yield row
    finally:
        close_all(pair)


def memcpy_rate(worker: Worker, timeout_s: float) -> float:
    """Of one copy in one thread [GB/s]. The speed of memory drifts, so every round that it is compared with has its own."""
    nbytes, (seconds,) = on_all([worker], timeout_s, memcpy, 1, 1)[0]
    return nbytes / 1e9 / seconds


def sample(shards: PrivateShards) -> list[torch.Tensor]:
    """The first tensors that together have at most MOST_BYTES, and at least one."""
    chosen, nbytes = [], 0
    for tensor in shards.tensors.values():
        if chosen and nbytes + tensor.nbytes > MOST_BYTES:
            break
        chosen.append(tensor)
        nbytes += tensor.nbytes
    return chosen


# --- run in a worker that holds a payload; all return (bytes, seconds of each repeat) ---


def memcpy(state: State, repeats: int, threads: int) -> tuple[int, list[float]]:
    """torch's copy into memory that was touched before."""
    tensors = sample(state["shards"])
    nbytes = _bytes_of(tensors)
    touched = torch.ones(nbytes, dtype=torch.uint8)  # in one piece, which goes back to the system at once
    targets = [part.view(DTYPE) for part in touched.split([tensor.nbytes for tensor in tensors])]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor.view(-1))

    return nbytes, _with_threads(threads, copy, repeats)


def first_touch(state: State, repeats: int) -> tuple[int, list[float]]:
    """torch's copy into memory fresh from the system."""
    tensors = sample(state["shards"])
    nbytes = _bytes_of(tensors)

    def copy() -> None:
        fresh = torch.empty(nbytes, dtype=torch.uint8)
        offset = 0
        for tensor in tensors:
            fresh[offset : offset + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            offset += tensor.nbytes

    return nbytes, repeated(copy, repeats)


def hashing(state: State, repeats: int) -> tuple[int, list[float]]:
    """xxh3-128 of every tensor, one thread."""
    tensors = sample(state["shards"])
    arrays = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
    return _bytes_of(tensors), repeated(lambda: [xxhash.xxh3_128(array).digest() for array in arrays], repeats)


def disk_write(state: State, repeats: int, directory: str) -> tuple[int, list[float]]:
    """The tensors, one after another into one new file, then fsync."""
    tensors = sample(state["shards"])
    arrays = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
    path = Path(directory) / "limit"

    def write() -> None:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            for array in arrays:
                file.write(array)
            file.flush()
            os.fsync(file.fileno())

    try:
        return _bytes_of(tensors), repeated(write, repeats)
    finally:
        path.unlink(missing_ok=True)


def gloo_broadcast(state: State, repeats: int) -> tuple[int, list[float]]:
    """One flat buffer from rank 0 to the other ranks of the group, into memory that was touched before."""
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in sample(state["shards"])])
    return flat.nbytes, repeated(lambda: dist.broadcast(flat, 0, group=state["group"]), repeats)


def _with_threads(threads: int, work: Callable[[], None], repeats: int) -> list[float]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return repeated(work, repeats)
    finally:
        torch.set_num_threads(before)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
