"""The trainer's side of a sync: a tiny Qwen3 on ranks in processes of their own. Only `Trainer` runs in the test's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from remote_processes import Remote, on_all
from tiny import changed, load_model, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import Qwen3ForCausalLM

from weight_sync import local_shards, open_sender

SIDES = {"one_rank": 1, "fsdp": 2, "tensor_parallel": 2}
"""How the policy is held, and by how many ranks."""
LEARNING_RATE = 1e-6


class Trainer:
    """Ranks that hold a new policy in float32; ``policy`` is what they hold, whole, known without asking them."""

    def __init__(self, ranks: list[Remote], side: str, model_dir: Path, seed: int):
        self.policy = first_policy(model_dir, seed)
        self.placements = on_all(ranks, hold, side, model_dir, seed)[0]
        self._ranks = ranks

    def open(self, transport: str, run_id: str, **options: Any) -> None:
        on_all(self._ranks, open_for, transport, run_id, options)

    def publish(self, version: int, dtype: torch.dtype) -> dict[str, Any]:
        return on_all(self._ranks, publish, version, dtype)[0]

    def step(self) -> None:
        step(self.policy)
        on_all(self._ranks, step_held)

    def close(self) -> None:
        on_all(self._ranks, close_sender)


def first_policy(model_dir: Path, seed: int) -> dict[str, torch.nn.Parameter]:
    weights = changed(weights_of(load_model(model_dir)), seed)
    return {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}


def step(parameters: dict[str, torch.nn.Parameter]) -> None:
    """One of AdamW, at a learning rate of post-training, from a gradient that every rank knows its part of."""
    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 3
    torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE).step()


def hold(state, side: str, model_dir: Path, seed: int) -> dict[str, list[str]]:
    """The placements of every parameter."""
    model = load_model(model_dir)
    model.load_state_dict(first_policy(model_dir, seed), strict=False)  # a tied output layer has no entry of its own
    if side == "fsdp":
        _shard(model)
    elif side == "tensor_parallel":
        _parallelize(model)
    state["parameters"] = dict(model.named_parameters())
    return {name: [str(p) for p in getattr(tensor, "placements", ())] for name, tensor in state["parameters"].items()}


def _shard(model: Qwen3ForCausalLM) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(model: Qwen3ForCausalLM) -> None:
    tied = model.config.tie_word_embeddings
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan = {
        "model.embed_tokens": RowwiseParallel(),
        "model.norm": SequenceParallel(),
        **{f"model.layers.*.{name}": ColwiseParallel() for name in columns},
        **{f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
        **({} if tied else {"lm_head": ColwiseParallel()}),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def open_for(state, transport: str, run_id: str, options: dict[str, Any]) -> None:
    rank, world_size, group = state.get("rank", 0), state.get("world_size", 1), state.get("group")
    state["sender"] = open_sender(transport, run_id=run_id, rank=rank, world_size=world_size, group=group, **options)


def publish(state, version: int, dtype: torch.dtype) -> dict[str, Any]:
    shards = (shard for name, tensor in state["parameters"].items() for shard in local_shards(name, tensor, dtype))
    return state["sender"].publish(version, shards)


def step_held(state) -> None:
    step(state["parameters"])


def close_sender(state) -> None:
    if "sender" in state:
        state.pop("sender").close()
