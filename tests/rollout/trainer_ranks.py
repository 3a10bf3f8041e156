"""The trainer's side of a sync, inside the processes of its ranks: a tiny Qwen3, sharded, published."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import changed, load_model, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import Qwen3ForCausalLM

from weight_sync import local_shards, open_sender

SIDES = {"one_rank": 1, "fsdp": 2, "tensor_parallel": 2}
"""How the policy is held, and by how many ranks."""


def weights(model_dir: Path, seed: int) -> dict[str, torch.Tensor]:
    """The policy to publish, whole: known without asking a trainer."""
    return changed(weights_of(load_model(model_dir)), seed)


def hold(state, model_dir: Path, seed: int, side: str) -> dict[str, list[str]]:
    """Hold ``weights`` as float32 masters; the placements of each."""
    model = load_model(model_dir)
    model.load_state_dict(weights(model_dir, seed), strict=False)  # a tied output layer has no entry of its own
    if side == "fsdp":
        _shard(model)
    elif side == "tensor_parallel":
        _parallelize(model)
    state["tensors"] = dict(model.named_parameters())
    return {name: [str(p) for p in getattr(tensor, "placements", ())] for name, tensor in state["tensors"].items()}


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


def publish(state, transport: str, run_id: str, options: dict, version: int, dtype: torch.dtype) -> dict:
    """With a sender opened for it, which stays open."""
    rank, world_size, group = state.get("rank", 0), state.get("world_size", 1), state.get("group")
    sender = state["sender"] = open_sender(
        transport, run_id=run_id, rank=rank, world_size=world_size, group=group, **options
    )
    shards = (shard for name, tensor in state["tensors"].items() for shard in local_shards(name, tensor, dtype))
    return sender.publish(version, shards)


def close_sender(state) -> None:
    if "sender" in state:
        state.pop("sender").close()
