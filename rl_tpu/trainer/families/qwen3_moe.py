"""Qwen3 with experts: some or all layers route every token to a few of many feed-forward networks.

Routing is Hugging Face's and SGLang's: the gate's product in the type of the weights, softmax and normalisation in float32.
torchtitan's balancing bias is off, for the router that the policy came with is what the engine samples with; nor is there
an auxiliary loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import silu
from torchtitan.models.common import CosSinRoPE, Linear
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from rl_tpu.config.schema import KernelConfig
from rl_tpu.errors import UserError
from rl_tpu.trainer.families.config_json import ConfigJson
from rl_tpu.trainer.families.decoder import READ, attention_block, decoder_spec, feed_forward
from rl_tpu.trainer.families.qwen3 import COMPUTED, default_rope
from rl_tpu.trainer.kernels.grouped_matmul import grouped_matmul

WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


class RouterGate(Linear):
    """The router's scores in float32, from a product in the type of the weights on every device.

    torchtitan asks autocast for a float32 product, which exists on some devices only; elsewhere it takes the softmax in
    bfloat16, where many of a hundred scores are equal.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input).float()


class Experts(GroupedExperts):
    """torchtitan's experts, in the type of their weights instead of always in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        blocks: tuple[int, int, int] | None = None
        """Tile sizes of rl_tpu::grouped_matmul, which computes the products; None: torch's grouped product does."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.blocks = config.blocks

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """[R, D], sorted by expert, with so many tokens for each -> [R, D]."""
        gate, down, up = (_local(getattr(self, name)) for name in WEIGHTS)
        product = self._product(num_tokens_per_expert_E)
        x = x_RD.to(gate.dtype)
        return product(silu(product(x, gate)) * product(x, up), down).type_as(x_RD)

    def _product(self, counts: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What multiplies rows, so many for each expert, by the transposes of the experts' matrices."""
        if self.blocks:
            return lambda rows, matrices: grouped_matmul(rows, matrices, counts, *self.blocks)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return lambda rows, matrices: self._grouped_mm(A=rows, B_t=matrices.transpose(-2, -1), offs=ends)


class Qwen3MoeModel(Qwen3Model):
    """torchtitan's model, which refuses to be cut: where ranks share an expert's matrices, torchtitan 0.3.0 does not sum
    their parts of the gradient that goes on from the experts to what is before them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            if (tensor := config.parallelism.tensor_parallel_degree) > 1:
                raise UserError(
                    f"trainer.parallel.tensor: {tensor} ranks cannot share the matrices of Qwen3MoeForCausalLM; use 1"
                )
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)


class Qwen3MoeAdapter(Qwen3StateDictAdapter):
    """torchtitan's adapter, also where ranks hold copies of the experts."""

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple, device_mesh: DeviceMesh
    ) -> tuple[int, int]:
        """First and last (exclusive) of the experts that this rank holds. The name is torchtitan's."""
        cuts = [placement if placement.is_shard(dim) else Replicate() for placement in dtensor_placements]
        parts = math.prod(device_mesh.size(i) for i, cut in enumerate(cuts) if cut.is_shard(dim))
        if dim_size % parts:
            raise UserError(
                f"trainer.parallel: {dim_size} experts do not divide among {parts} shards; use trainer.parallel.replicas"
            )
        (size,), (first,) = compute_local_shape_and_global_offset((dim_size,), device_mesh, cuts)
        return first, first + size


def model_spec(config: ConfigJson, max_tokens: int, kernels: KernelConfig) -> ModelSpec:
    config.only(COMPUTED)
    config.full_attention()
    layers_of_experts = _layers_of_experts(config)
    rope = _rope(config, max_tokens)
    layers = [
        Qwen3TransformerBlock.Config(
            **attention_block(config, rope, kernels, qk_norm=True),
            **({"moe": _experts(config, kernels)} if has_experts else {"feed_forward": feed_forward(config)}),
        )
        for has_experts in layers_of_experts
    ]
    return decoder_spec("qwen3_moe", config, Qwen3MoeModel.Config, layers, parallelize_qwen3, Qwen3MoeAdapter)


def _layers_of_experts(config: ConfigJson) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but for those that are named."""
    dense, step = config.indices("mlp_only_layers"), config.count("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.count("num_hidden_layers"))]


def _experts(config: ConfigJson, kernels: KernelConfig) -> MoE.Config:
    dim, chosen = config.count("hidden_size"), config.count("num_experts_per_tok")
    experts = config.count("num_experts" if "num_experts" in config.settings else "num_local_experts")
    if chosen > experts:
        config.refuse(f"num_experts_per_tok = {chosen}, more than its {experts} experts")
    router = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init=READ,
        top_k=chosen,
        score_func="softmax",
        route_norm=config.flag("norm_topk_prob", False),
    )
    router.gate = RouterGate.Config(in_features=dim, out_features=experts, param_init=READ)
    routed = make_routed_experts_config(
        dim=dim,
        hidden_dim=config.count("moe_intermediate_size"),
        num_experts=experts,
        top_k=chosen,
        param_init={},
        comm_backend="standard",
    )
    routed.inner_experts = Experts.Config(
        dim=dim,
        hidden_dim=config.count("moe_intermediate_size"),
        num_experts=experts,
        param_init=dict.fromkeys(WEIGHTS, skip_param_init),
        blocks=(kernels.experts_block_rows, kernels.experts_block_inner, kernels.experts_block_columns)
        if kernels.experts == "grouped"
        else None,
    )
    return make_moe_config(num_experts=experts, router=router, routed_experts=routed, load_balance_coeff=None)


def _rope(config: ConfigJson, max_tokens: int) -> CosSinRoPE.Config:
    """As in dense Qwen3, but for the default of head_dim."""
    head_dim = config.count("head_dim", config.count("hidden_size") // config.count("num_attention_heads"))
    return default_rope(config, head_dim, max_tokens)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
