"""The policy as torchtitan builds it: from a Hugging Face directory, shared by all ranks as the configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module

from rl_tpu.config.schema import TrainerConfig
from rl_tpu.devices import Device
from rl_tpu.errors import UserError
from rl_tpu.trainer.families import model_spec
from rl_tpu.trainer.parallel import build_mesh, parallelism_of, parallelize, plain_parameters
from rl_tpu.trainer.policy import Policy


def build_policy(
    model_dir: Path,
    device: Device,
    torch_device: torch.device,
    config: TrainerConfig,
    *,
    mesh: ParallelDims | None = None,
    frozen: bool = False,
) -> Policy:
    """The model of `model_dir` (config.json), uninitialised, for the longest row that `config` allows.

    Forward and backward run in `param_dtype`; parameters, the reduction of gradients and the optimizer in float32. One
    that is `frozen` has no gradients, keeps its parameters in `param_dtype`, and in host memory if `offload_reference`
    says so. `mesh` is one of all ranks that `build_mesh` made; default: a new one.

    Raises UserError for a directory without a readable config.json, an architecture without a family, one whose heads do
    not divide among the ranks, or a fused head whose vocabulary would.
    """
    graph, kernels = config.execution.mode == "graph", config.kernels
    if graph:  # to be captured, torch's own product of the experts would have to be in bfloat16
        kernels = kernels.model_copy(update={"experts": "grouped"})
    spec = model_spec(read_config(model_dir), max(config.row_tokens), kernels)
    spec.model.lm_head.tiles = head_tiles(config)
    mesh = mesh or build_mesh(config.parallel)
    if mesh.tp_enabled:
        check_heads(spec.model, mesh.tp, model_dir)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism_of(config.parallel)))
    for _, part, _, _ in spec.model.traverse(Module.Config, recurse=True):
        if part.param_init:  # the weights will be read: drawing them first would only cost time
            part.param_init = dict.fromkeys(part.param_init, skip_param_init)
    with torch.device("meta"):
        model = spec.model.build()
    if frozen:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(getattr(torch, config.param_dtype))
    offload = frozen and config.offload_reference
    parallelize(model, mesh, config, device, offload)
    model.to_empty(device="cpu" if offload else torch_device)
    with torch.no_grad(), plain_parameters():
        # Rotary tables, and the tie of embedding and head.
        model.init_weights(buffer_device=torch_device if offload else None)
    _share_rotary_tables(model)
    model.train(not frozen)
    adapter = spec.state_dict_adapter(spec.model, None)
    static_shapes, splash = graph or not device.dynamic_shapes, kernels.attention == "splash"
    return Policy(model, adapter, torch_device, mesh, static_shapes, splash)


def _share_rotary_tables(model: Decoder) -> None:
    """One for all layers, which differ in nothing that it depends on; torchtitan makes one for each (23 MB for rows of 22,528
    tokens)."""
    first, *others = (module for module in model.modules() if isinstance(module, RoPE))
    for module in others:
        module.cache = first.cache


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    path = model_dir / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"model.path: cannot read {path} ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"model.path: {path} is not JSON ({error})") from error


def head_tiles(config: TrainerConfig) -> tuple[int, int] | None:
    """Tokens and vocabulary entries per tile of the fused output layer; None for the plain one."""
    kernels, tensor = config.kernels, config.parallel.tensor
    if kernels.head == "plain":
        return None
    if tensor > 1:
        raise UserError(
            f"trainer.kernels.head: fused needs the whole vocabulary on every rank, and trainer.parallel.tensor {tensor}"
            " divides it; use head plain, or tensor 1"
        )
    return kernels.head_block_tokens, kernels.head_block_vocabulary


def check_heads(model: Decoder.Config, tensor: int, model_dir: Path) -> None:
    """UserError where so many ranks cannot have equally many heads each."""
    attention = model.first_attention
    if attention.n_heads % tensor or attention.n_kv_heads % tensor:
        raise UserError(
            f"trainer.parallel.tensor: {tensor} ranks cannot share the {attention.n_heads} heads and "
            f"{attention.n_kv_heads} key-value heads of {model_dir}; choose a common divisor"
        )
