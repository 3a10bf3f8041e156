"""The functions that run inside the processes of senders and receivers (``state`` is theirs)."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import time
from pathlib import Path

import torch
from remote_processes import Remote as Remote
from remote_processes import join as join

from weight_sync import Shard, open_receiver, open_sender


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def policy(seed: int) -> dict[str, torch.Tensor]:
    """Random bits (NaNs with payloads among them) of every kind of dtype, sizes that divide by nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    return {
        "model.embed_tokens.weight": draw(torch.bfloat16, 257, 33),
        "model.layers.0.mlp.experts.weight": draw(torch.float32, 5, 7, 9),
        "model.layers.0.input_layernorm.weight": draw(torch.float32, 33),
        "model.layers.0.mlp.up_proj.weight": draw(torch.float16, 11, 130),
        "model.layers.0.mlp.up_proj.weight_scale": draw(torch.float64, 1, 1),
        "model.layers.0.mlp.down_proj.weight": draw(torch.float8_e4m3fn, 130, 11),
        "model.layers.0.router.counts": draw(torch.int64, 6),
        "model.layers.0.router.bias": draw(torch.bfloat16),
        "model.layers.0.unused": draw(torch.float32, 0, 4),
    }


def expected(seed: int) -> dict[str, tuple[str, tuple, bytes]]:
    """What `receive` finds of ``policy(seed)``."""
    return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in policy(seed).items()}


def cut(name: str, tensor: torch.Tensor, dim: int, start: int, end: int) -> Shard:
    offsets = [0] * tensor.dim()
    offsets[dim] = start
    return Shard(name, tuple(tensor.shape), tuple(offsets), tensor.narrow(dim, start, end - start))


def shards_of(tensors: dict[str, torch.Tensor], rank: int, world_size: int, how: str) -> list[Shard]:
    """This rank's part: ``rows`` and ``columns`` as FSDP and tensor parallelism cut, ``uneven`` leaves ranks little or
    nothing. What cannot be cut so is replicated on every rank."""
    shards = []
    for name, tensor in tensors.items():
        dim = {"rows": 0, "columns": 1, "uneven": 0}[how]
        if tensor.dim() <= dim:
            shards.append(Shard.whole(name, tensor))
            continue
        size = tensor.shape[dim]
        chunk = -(-size // world_size) if how != "uneven" else max(1, size - 1)
        start, end = min(size, rank * chunk), min(size, (rank + 1) * chunk)
        if rank == world_size - 1:
            end = size
        shards.append(cut(name, tensor, dim, start, end))
    return shards


# --- run in a sender's process ---


def open_for(state, run_id: str, options: dict) -> None:
    rank, world_size, group = state.get("rank", 0), state.get("world_size", 1), state.get("group")
    state["sender"] = open_sender(
        "shared_memory", run_id=run_id, rank=rank, world_size=world_size, group=group, **options
    )


def publish(state, version: int, seed: int, how: str) -> dict:
    shards = shards_of(policy(seed), state.get("rank", 0), state.get("world_size", 1), how)
    return state["sender"].publish(version, iter(shards))


def publish_without(state, version: int, name: str, rank: int) -> dict:
    """Everything by rows, but ``rank`` forgets its part of ``name``."""
    shards = shards_of(policy(version), state["rank"], state["world_size"], "rows")
    return state["sender"].publish(version, [s for s in shards if (s.name, state["rank"]) != (name, rank)])


def publish_failing(state, version: int, rank: int) -> dict:
    """The export of ``rank`` breaks half-way."""

    def shards():
        for number, shard in enumerate(shards_of(policy(version), state["rank"], state["world_size"], "rows")):
            if state["rank"] == rank and number == 2:
                raise OSError("device lost")
            yield shard

    return state["sender"].publish(version, shards())


def publish_constant(state, version: int, numel: int) -> dict:
    return state["sender"].publish(version, [Shard.whole("weight", torch.full((numel,), float(version)))])


def publish_until(state, stop: str, numel: int, newest: str) -> None:
    """As fast as possible; the newest handle is left in a file, replaced in one step."""
    for version in itertools.count(1):
        handle = publish_constant(state, version, numel)
        Path(newest + ".new").write_text(json.dumps(handle))
        os.replace(newest + ".new", newest)
        if os.path.exists(stop):
            return


def sender_manifest(state) -> str:
    return state["sender"].manifest.to_json()


def close_sender(state) -> None:
    state.pop("sender").close()


def publish_rows_of_constant(state, version: int, numel: int) -> dict:
    """Each rank its rows of one tensor, and a second that all ranks hold."""
    tensors = {"weight": torch.full((numel,), float(version)), "norm": torch.full((9,), float(version))}
    shards = shards_of(tensors, state.get("rank", 0), state.get("world_size", 1), "rows")
    return state["sender"].publish(version, [*shards, Shard.whole("replica", tensors["norm"])])


# --- run in an engine's process ---


def open_receiving(state, options: dict) -> None:
    state["receiver"] = open_receiver("shared_memory", **options)


def receive(state, handle: dict) -> dict[str, tuple[str, tuple, bytes]]:
    with state["receiver"].receive(handle) as received:
        return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in received.tensors.items()}


def receive_and_scale(state, handle: dict, name: str) -> float:
    """As a model's loader may: the tensor is changed in place."""
    with state["receiver"].receive(handle) as received:
        tensor = received.tensors[name]
        tensor += 1
        assert tensor.min() == tensor.max()
        return float(tensor[0])


def receive_and_hang(state, handle: dict, loading: str) -> None:
    """Half of the tensors are loaded when the engine stops for good."""
    with state["receiver"].receive(handle) as received:
        state["loaded"] = [tensor.clone() for tensor in list(received.tensors.values())[: len(received.tensors) // 2]]
        Path(loading).touch()
        time.sleep(600)


def footprint(state) -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that the allocator keeps would hide a leak
    status = Path("/proc/self/status").read_text()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "rss_bytes": int(status.split("VmRSS:")[1].split()[0]) * 1024,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": sum("weight_sync" in line for line in maps),
    }
