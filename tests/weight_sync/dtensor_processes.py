"""Parameters as the trainer's ranks hold them, one builder per way to shard, and what runs inside the ranks.

Every builder makes the same values on every rank first, so that what it cuts up is known without asking DTensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sync_processes import bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from weight_sync import WeightSyncError, local_shards, open_receiver, open_sender

Tensors = dict[str, torch.Tensor]
LEARNING_RATE = 1e-6


class Block(nn.Module):
    """Sizes that no number of ranks divides (``even``: that 4 divides), and a norm with fewer rows than 4 ranks."""

    def __init__(self, even: bool = False, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        rows, hidden, inner = (12, 8, 16) if even else (13, 6, 11)
        self.embed = nn.Embedding(rows, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.scale = nn.Parameter(torch.randn(1, 3, 2))
        self.head = nn.Linear(hidden, rows, bias=False)
        nn.init.normal_(self.norm.weight)
        if tied:
            self.head.weight = self.embed.weight


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def _values(module: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _tensor_parallel(block: Block, mesh: DeviceMesh) -> None:
    plan = {
        "embed": RowwiseParallel(),  # of an embedding: the vocabulary
        "norm": SequenceParallel(),  # replicated
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(),
    }
    parallelize_module(block, mesh, plan)


def one_rank(world_size: int) -> tuple[Tensors, Tensors]:
    block = Block()
    return dict(block.named_parameters()), _values(block)


def fsdp(world_size: int) -> tuple[Tensors, Tensors]:
    block = Block()
    whole = _values(block)
    fully_shard(block, mesh=_mesh(world_size))
    return dict(block.named_parameters()), whole


def fsdp_columns(world_size: int) -> tuple[Tensors, Tensors]:
    block = Block(even=True)
    whole = _values(block)
    mesh = _mesh(world_size)
    fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    return dict(block.named_parameters()), whole


def tensor_parallel(world_size: int) -> tuple[Tensors, Tensors]:
    block = Block()
    whole = _values(block)
    _tensor_parallel(block, _mesh(world_size))
    return dict(block.named_parameters()), whole


def fsdp_of_tensor_parallel(dp: int, tp: int) -> tuple[Tensors, Tensors]:
    """Strided placements."""
    block = Block()
    whole = _values(block)
    mesh = _mesh(dp, tp)
    _tensor_parallel(block, mesh["tp"])
    fully_shard(block, mesh=mesh["dp"])
    return dict(block.named_parameters()), whole


def hsdp(world_size: int) -> tuple[Tensors, Tensors]:
    block = Block()
    whole = _values(block)
    fully_shard(block, mesh=_mesh(2, world_size // 2))
    return dict(block.named_parameters()), whole


def tied(world_size: int) -> tuple[Tensors, Tensors]:
    """The shared parameter under one name, as named_parameters lists it."""
    block = Block(tied=True)
    whole = _values(block)
    fully_shard(block, mesh=_mesh(world_size))
    assert "head.weight" not in whole
    return dict(block.named_parameters()), whole


def tied_under_two_names(world_size: int) -> tuple[Tensors, Tensors]:
    tensors, whole = tied(world_size)
    assert "head.weight" not in tensors
    return {**tensors, "head.weight": tensors["embed.weight"]}, {**whole, "head.weight": whole["embed.weight"]}


def grid(world_size: int) -> tuple[Tensors, Tensors]:
    """Placements that no wrapper makes: two dimensions at once, one dimension twice."""
    mesh = _mesh(2, world_size // 2)
    torch.manual_seed(0)
    whole = {name: torch.randn(7, 5, 3) for name in ("rows_and_columns", "rows_twice", "inner", "one")}
    placements = {
        "rows_and_columns": [Shard(0), Shard(1)],
        "rows_twice": [Shard(0), Shard(0)],
        "inner": [Replicate(), Shard(2)],
        "one": [Shard(1), Replicate()],
    }
    return {name: distribute_tensor(whole[name], mesh, placements[name]) for name in whole}, whole


def reshaped(world_size: int) -> tuple[Tensors, Tensors]:
    """Local values that are several regions of the whole, views that are not contiguous, and no dimension at all."""
    mesh = _mesh(world_size)
    torch.manual_seed(0)
    whole = torch.randn(6, 4 * world_size, 3)
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    experts = distribute_tensor(whole, mesh, [Shard(0)])
    tensors = {
        "flattened": (columns.flatten(0, 1), whole.flatten(0, 1)),
        "transposed": (columns.transpose(1, 2), whole.transpose(1, 2)),
        "expert": (experts.transpose(0, 2), whole.transpose(0, 2)),
        "scalar": (distribute_tensor(whole[0, 0, 0], mesh, [Replicate()]), whole[0, 0, 0]),
        "empty": (distribute_tensor(whole[:, :, :0], mesh, [Shard(1)]), whole[:, :, :0]),
    }
    assert not tensors["transposed"][0].to_local().is_contiguous()
    return {name: one for name, (one, _) in tensors.items()}, {name: other for name, (_, other) in tensors.items()}


BUILDERS: dict[str, Callable[..., tuple[Tensors, Tensors]]] = {
    builder.__name__: builder
    for builder in (
        fsdp,
        fsdp_columns,
        fsdp_of_tensor_parallel,
        grid,
        hsdp,
        one_rank,
        reshaped,
        tensor_parallel,
        tied,
        tied_under_two_names,
    )
}


# --- run in a rank's process, after sync_processes.join ---


def build(state, how: str, *sizes: int) -> dict[str, list[str]]:
    """The placements of each parameter."""
    state["tensors"], state["whole"] = BUILDERS[how](*sizes)
    return {name: [str(p) for p in getattr(tensor, "placements", ())] for name, tensor in state["tensors"].items()}


def open_for(state, transport: str, run_id: str, options: dict) -> None:
    rank, world_size, group = state.get("rank", 0), state.get("world_size", 1), state.get("group")
    state["sender"] = open_sender(transport, run_id=run_id, rank=rank, world_size=world_size, group=group, **options)


def publish(state, version: int, dtype: torch.dtype | None) -> dict:
    shards = (shard for name, tensor in state["tensors"].items() for shard in local_shards(name, tensor, dtype))
    return state["sender"].publish(version, shards)


def expected(state, dtype: torch.dtype | None) -> dict[str, tuple[str, tuple, bytes]]:
    """What a receiver must find: the values from before they were cut up; ``full_tensor`` agrees with them."""
    for name, tensor in state["tensors"].items():
        if isinstance(tensor, DTensor):
            assert torch.equal(tensor.full_tensor(), state["whole"][name]), name
    cast = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state["whole"].items()}
    return {name: (str(tensor.dtype), tuple(tensor.shape), bits(tensor)) for name, tensor in cast.items()}


def train(state) -> None:
    """One AdamW step from a gradient that is zero for the norm; the whole values follow by the same step."""
    whole = {name: nn.Parameter(tensor) for name, tensor in state["whole"].items()}
    for parameters in (whole, state["tensors"]):
        for name, parameter in parameters.items():
            parameter.grad = parameter.detach() * (0 if "norm" in name else 3)
        torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, weight_decay=0).step()
    state["whole"] = {name: parameter.detach() for name, parameter in whole.items()}


def partial_sums(state) -> str:
    """What a DTensor of partial sums is answered with."""
    mesh = _mesh(state["world_size"])
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    try:
        local_shards("bias", tensor)
    except WeightSyncError as error:
        return str(error)
    raise AssertionError("a DTensor of partial sums was taken")


def foreign_local(state) -> str:
    """What a DTensor is answered with whose local tensor is larger than its placements say."""
    mesh = _mesh(state["world_size"])
    tensor = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False, shape=(6, 2), stride=(2, 1))
    try:
        local_shards("bias", tensor)
    except WeightSyncError as error:
        return str(error)
    raise AssertionError("a DTensor that contradicts itself was taken")


# --- run in an engine's process ---


def receive(state, transport: str, handle: dict) -> dict[str, tuple[str, tuple, bytes]]:
    if "receiver" not in state:
        state["receiver"] = open_receiver(transport)
    with state["receiver"].receive(handle) as received:
        return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in received.tensors.items()}


def close_receiver(state) -> None:
    if "receiver" in state:
        state.pop("receiver").close()
