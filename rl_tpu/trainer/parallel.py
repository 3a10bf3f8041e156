"""How ranks share a model: the mesh they form, and what torchtitan and torch make of a model on it.

Ranks form replicas x shards x tensor, the last one counting fastest. Gradients are summed over replicas and shards, never
averaged: the loss of every data rank is its own part of one sum.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.experiments.graph_trainer import simple_fsdp
from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp
from torchtitan.models.common.decoder import Decoder

from rl_tpu.config.schema import ParallelConfig, TrainerConfig
from rl_tpu.devices import Device
from rl_tpu.errors import UserError
from rl_tpu.trainer.policy import fsdp_modules

SPMD_BACKEND = "partial_dtensor"
"""torchtitan 0.3.0's default fails above one rank on torch 2.13.0."""


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's choice of what is kept, and our attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.rl_tpu.segment_attention.default}


CHECKPOINTING = {"selective": SelectiveCheckpointing.Config, "full": FullAC.Config}


def parallelism_of(parallel: ParallelConfig) -> ParallelismConfig:
    """torchtitan's name for it; what is left of the ranks shards the parameters."""
    return ParallelismConfig(
        data_parallel_replicate_degree=parallel.replicas,
        data_parallel_shard_degree=-1,
        tensor_parallel_degree=parallel.tensor,
        spmd_backend=SPMD_BACKEND,
    )


def build_mesh(parallel: ParallelConfig) -> ParallelDims:
    """The mesh of all ranks of the process group."""
    set_spmd_backend(SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism_of(parallel), dist.get_world_size())
    dims.build_mesh()
    return dims


def parallelize(
    model: Decoder, dims: ParallelDims, config: TrainerConfig, device: Device, offload: bool = False
) -> None:
    """Cut the layers' matrices, wrap and compile the blocks and shard the parameters of `model`, still on `meta`.

    With `offload` this rank's parameters stay in host memory and come to the device while they are needed.
    """
    if config.execution.mode == "graph":  # its programs cast, gather and compute again what they need
        if dims.world_size > 1:
            _divide(model, dims.get_mesh("fsdp"))
        return
    if dims.tp_enabled:
        model.parallelize(dims)
        _check_sizes(model, dims)
    if config.activation_checkpointing != "none":
        CHECKPOINTING[config.activation_checkpointing]().build(dump_folder="").apply(model)
    if config.execution.mode == "compile":
        if dims.tp_enabled:
            # To compiled code a sum that is still under way is of another type than one that is there: wait for it.
            model.tok_embeddings.register_forward_hook(lambda module, inputs, embedded: embedded.clone())
        for block in model.layers.children():
            # Where shapes depend on the data, those that changed become symbols. All of them at once would take the numbers
            # of dimensions along, which tensor parallelism cannot use.
            block.compile(backend=device.compile_backend, dynamic=None if device.dynamic_shapes else False)
    if config.parallel.sharding == "simple_fsdp" and not offload:
        # Its classes are cached with the first model's mesh and precision in them.
        simple_fsdp._wrap_class_cache.clear()
        precision = TrainingConfig(mixed_precision_param=config.param_dtype, mixed_precision_reduce="float32")
        apply_simple_fsdp(model, parallel_dims=dims, training=precision)
    elif dims.world_size > 1 or config.param_dtype != "float32" or offload:
        _fully_shard(model, dims, getattr(torch, config.param_dtype), device, offload)


def _divide(model: Decoder, mesh: DeviceMesh) -> None:
    """Make of every parameter a DTensor that is divided along its first dimension, as FSDP2 does."""
    divided: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if whole not in divided:
                shares = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                divided[whole] = torch.nn.Parameter(shares, requires_grad=whole.requires_grad)
            module.register_parameter(name, divided[whole])


def _check_sizes(model: Decoder, dims: ParallelDims) -> None:
    """Refuse what torch 2.13.0 gathers wrongly: a first dimension that tensor parallelism and then shards cut unevenly."""
    for name, parameter in model.named_parameters():
        cut = dims.tp if Shard(0) in getattr(parameter, "placements", ()) else 1
        if dims.fsdp_enabled and cut > 1 and len(parameter) % (cut * dims.dp_shard):
            raise UserError(
                f"trainer.parallel: the {len(parameter)} rows of {name} do not divide into tensor {dims.tp} x"
                f" {dims.dp_shard} shards; use trainer.parallel.replicas instead of shards, or no tensor parallelism"
            )


def plain_parameters() -> AbstractContextManager:
    """Within it, the parameters of a SimpleFSDP model are themselves and not what the forward gathers from them."""
    return simple_fsdp.disable_active_parametrization()


def _fully_shard(model: Decoder, dims: ParallelDims, dtype: torch.dtype, device: Device, offload: bool) -> None:
    """FSDP2: a unit per block, one or two for what is before and after."""
    mesh: DeviceMesh = dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.pins_memory) if offload else OffloadPolicy(),
    }
    if not model.enable_weight_tying:
        fully_shard(model.tok_embeddings, **options)
    for block in model.layers.children():
        fully_shard(block, **options)
    # The head, which is called after the model, is in the unit of the whole: gathered until the backward is through.
    fully_shard(model, **options)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # not every backend has a pre-multiplied sum
