"""The policy as torchtitan builds it: from a Hugging Face directory, sharded over all ranks with FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module

from rl_tpu.devices import Device
from rl_tpu.errors import UserError
from rl_tpu.trainer.families import model_spec
from rl_tpu.trainer.policy import Policy, fsdp_modules

SPMD_BACKEND = "partial_dtensor"
"""torchtitan 0.3.0's default fails above one rank on torch 2.13.0."""


def build_policy(
    model_dir: Path, device: Device, torch_device: torch.device, *, max_tokens: int, param_dtype: str
) -> Policy:
    """The model of `model_dir` (config.json), uninitialised, for samples of up to `max_tokens` tokens.

    Forward and backward run in `param_dtype`; parameters, the reduction of gradients and the optimizer in float32.
    Raises UserError for a directory without a readable config.json or an architecture without a family.
    """
    spec = model_spec(read_config(model_dir), max_tokens)
    parallelism = ParallelismConfig(spmd_backend=SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    set_spmd_backend(SPMD_BACKEND)
    dims.build_mesh()
    for _, part, _, _ in spec.model.traverse(Module.Config, recurse=True):
        if part.param_init:  # the weights will be read: drawing them first would only cost time
            part.param_init = dict.fromkeys(part.param_init, skip_param_init)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(
            seq_len=max_tokens, mixed_precision_param=param_dtype, mixed_precision_reduce="float32"
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    if device.needs_sum_reduction:
        for module in fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=torch_device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # rotary tables, and the tie of embedding and head
    model.train()
    return Policy(model, spec.state_dict_adapter(spec.model, None), torch_device)


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    path = model_dir / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"model.path: cannot read {path} ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"model.path: {path} is not JSON ({error})") from error
