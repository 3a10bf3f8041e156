"""What runs in the processes of senders and receivers through storage (``state`` is theirs)."""

from __future__ import annotations

import os
import signal

import torch
from sync_processes import bits, policy, shards_of

from weight_sync import Shard, open_receiver, open_sender

FROZEN = "model.layers.0.input_layernorm.weight"


def steps(count: int) -> dict[str, torch.Tensor]:
    """The policy after ``count`` updates: each flips low bits of a twentieth of the bytes; one tensor is frozen."""
    tensors = policy(0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1).view(torch.uint8)
            flips = (torch.rand(flat.shape, generator=generator) < 0.05).to(torch.uint8)
            if name != FROZEN:
                flat ^= flips
    return tensors


def wire(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple, bytes]]:
    return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in tensors.items()}


def open_disk(state, transport: str, options: dict) -> None:
    ranks = {key: state[key] for key in ("rank", "world_size", "group") if key in state}
    state["disk_sender"] = open_sender(transport, run_id="test", **ranks, **options)


def publish_step(state, version: int, how: str = "rows", whole: bool = False) -> dict:
    """Version ``version`` is the policy after as many updates."""
    shards = shards_of(steps(version), state.get("rank", 0), state.get("world_size", 1), how)
    return state["disk_sender"].publish(version, iter(shards), whole=whole)


def publish_tensors(state, version: int, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict:
    shards = shards_of(tensors, state.get("rank", 0), state.get("world_size", 1), "rows")
    shards = [Shard(s.name, s.global_shape, s.offsets, s.data, dtype) for s in shards]
    return state["disk_sender"].publish(version, shards)


def publish_zeros(state, version: int, nbytes: int, whole: bool = False) -> dict:
    rank, ranks = state.get("rank", 0), state.get("world_size", 1)
    part = torch.full((nbytes // ranks,), version, dtype=torch.uint8)
    return state["disk_sender"].publish(version, [Shard("w", (nbytes,), (rank * len(part),), part)], whole=whole)


def publish_noise(state, version: int, nbytes: int, whole: bool = False) -> dict:
    """Bytes that nothing compresses."""
    rank, ranks = state.get("rank", 0), state.get("world_size", 1)
    generator = torch.Generator().manual_seed(100 * version + rank)
    part = torch.randint(0, 256, (nbytes // ranks,), dtype=torch.uint8, generator=generator)
    return state["disk_sender"].publish(version, [Shard("w", (nbytes,), (rank * len(part),), part)], whole=whole)


def publish_and_die_at(state, version: int, rank: int, file_number: int) -> None:
    """``rank`` is killed with its file number ``file_number`` half written."""
    if state.get("rank", 0) == rank:
        from weight_sync.disk.storage import local

        written = []
        write = local._LocalWriter.write

        def half(self, data):
            written.append(self)
            if len(set(map(id, written))) == file_number:
                write(self, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, data)

        local._LocalWriter.write = half
    publish_step(state, version)


def publish_and_die_before_commit(state, version: int) -> None:
    """Killed when all tensors are stored."""
    from weight_sync.disk.storage import objects

    objects.ObjectStore.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    publish_step(state, version)


def fill_after_check(state, path: str, nbytes: int) -> None:
    """Somebody else takes the space when the next version has begun."""
    from weight_sync.disk.storage import local

    begin = local.LocalStore.begin

    def filled(self, directory):
        begin(self, directory)
        local.LocalStore.begin = begin
        with open(path, "wb") as file:
            file.write(bytes(nbytes))

    local.LocalStore.begin = filled


def sender_stats(state) -> dict[str, float]:
    return state["disk_sender"].stats


def open_disk_receiver(state, transport: str, options: dict) -> None:
    state["disk_receiver"] = open_receiver(transport, **options)


def receive_disk(state, handle: dict) -> tuple[dict, dict]:
    with state["disk_receiver"].receive(handle) as received:
        return wire(received.tensors), received.stats


def receive_disk_only(state, handle: dict) -> None:
    state["disk_receiver"].receive(handle).check()


def receive_and_die(state, handle: dict) -> None:
    """Killed when half of the tensors are unpacked."""
    from weight_sync.disk import receiver as disk_receiver

    count = 0
    apply = disk_receiver.delta.apply_chunk

    def half(*args):
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        apply(*args)

    disk_receiver.delta.apply_chunk = half
    state["disk_receiver"].receive(handle)
