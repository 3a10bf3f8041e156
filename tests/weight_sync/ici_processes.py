"""What runs inside the processes of ici's senders and receivers, and the faults that tests put into them."""

from __future__ import annotations

import os
import signal
import time

import torch
from sync_processes import bits, policy, shards_of

from weight_sync import Shard, open_receiver, open_sender
from weight_sync.ici.links import Group, Store
from weight_sync.ici.publication import whole_regions
from weight_sync.sender import Region

# --- in a sender's process ---


def open_ici(state, run_id: str, options: dict) -> None:
    rank, world_size, group = state.get("rank", 0), state.get("world_size", 1), state.get("group")
    options = {"timeout_s": 60, **options}
    state["sender"] = open_sender("ici", run_id=run_id, rank=rank, world_size=world_size, group=group, **options)


def publish(state, version: int, seed: int, how: str) -> dict:
    tensors, rank, world_size = policy(seed), state.get("rank", 0), state.get("world_size", 1)
    whole = [Shard.whole(name, tensor) for name, tensor in tensors.items()]
    return state["sender"].publish(version, whole if how == "whole" else shards_of(tensors, rank, world_size, how))


def publish_rows(state, version: int, rows: int, columns: int) -> dict:
    """Two tensors cut over the ranks, their values known from the version."""
    rank, world_size = state.get("rank", 0), state.get("world_size", 1)
    start, end = rank * rows // world_size, (rank + 1) * rows // world_size
    shards = []
    for number, name in enumerate(("first", "second")):
        part = torch.full((end - start, columns), float(version + number))
        shards.append(Shard(name, (rows, columns), (start, 0), part))
    return state["sender"].publish(version, shards)


def manifest(state) -> str:
    return state["sender"].manifest.to_json()


def close_sender(state) -> None:
    state.pop("sender").close()


def flip_a_byte(state, message: int) -> None:
    """Of the so many-eth message that this process sends from now on, on its way."""
    count = 0

    def flip(data: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count != message:
            return data
        state["flipped"] = data.clone()
        state["flipped"][0] ^= 1
        return state["flipped"]

    send, broadcast = Group.send, Group.broadcast
    Group.send = lambda self, data, rank: send(self, flip(data), rank)
    Group.broadcast = lambda self, data: broadcast(self, flip(data))


def die_sending(state, message: int) -> None:
    """This process is killed when it sends its so many-eth message from now on."""
    count = 0
    send, broadcast = Group.send, Group.broadcast

    def step() -> None:
        nonlocal count
        count += 1
        if count == message:
            os.kill(os.getpid(), signal.SIGKILL)

    def send_or_die(self, data: torch.Tensor, rank: int):
        step()
        return send(self, data, rank)

    def broadcast_or_die(self, data: torch.Tensor):
        step()
        return broadcast(self, data)

    Group.send, Group.broadcast = send_or_die, broadcast_or_die


def send_slowly(state, delay_s: float) -> None:
    """Every broadcast waits so long first, from now on."""
    broadcast = Group.broadcast

    def later(self, data: torch.Tensor):
        time.sleep(delay_s)
        return broadcast(self, data)

    Group.broadcast = later


# --- in a receiver's process ---


def half_of_columns(rank: int, world_size: int):
    """What a rank of a tensor-parallel engine needs: its part of matrices, everything else whole."""

    def wants(manifest) -> list[Region]:
        regions = []
        for region in whole_regions(manifest):
            if len(region.shape) == 2:
                size = region.shape[1]
                start, end = rank * size // world_size, (rank + 1) * size // world_size
                region = Region(
                    region.name, region.dtype, region.global_shape, (0, start), (region.shape[0], end - start)
                )
            regions.append(region)
        return regions

    return wants


def open_ici_receiver(state, options: dict, columns: bool = False) -> None:
    if columns:
        options = {**options, "wants": half_of_columns(options["rank"], options["world_size"])}
    state["receiver"] = open_receiver("ici", **{"timeout_s": 60, **options})


def receive(state, handle: dict) -> dict[str, tuple[str, tuple, bytes]]:
    with state["receiver"].receive(handle) as received:
        return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in received.tensors.items()}


def receive_rows(state, handle: dict) -> dict[str, set[float]]:
    """The values found in every tensor."""
    with state["receiver"].receive(handle) as received:
        return {name: set(tensor.unique().tolist()) for name, tensor in received.tensors.items()}


def signal_receiving(state, message: int, signum: int) -> None:
    """This process sends itself a signal, once, when it receives its so many-eth message from now on."""
    count = 0
    receive = Group.receive

    def receive_or_signal(self, data: torch.Tensor, rank: int):
        nonlocal count
        count += 1
        if count == message:
            os.kill(os.getpid(), signum)
        return receive(self, data, rank)

    Group.receive = receive_or_signal


def close_receiver(state) -> None:
    state.pop("receiver").close()


def draw_a_number(state, handle: dict) -> None:
    """As a receiver does that dies before it has said what it wants."""
    Store.connect(handle["store"], 10).count("requests")


def publish_tensors(state, version: int, tensors: dict, how: str) -> dict:
    rank, world_size = state.get("rank", 0), state.get("world_size", 1)
    return state["sender"].publish(version, shards_of(tensors, rank, world_size, how))
