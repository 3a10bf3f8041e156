"""What the families have in common: a torchtitan decoder whose parts have the sizes that a config.json says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.models.common import Embedding, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from rl_tpu.config.schema import KernelConfig
from rl_tpu.trainer.attention import SegmentAttention
from rl_tpu.trainer.families.config_json import ConfigJson
from rl_tpu.trainer.head import LogprobHead

READ = {"weight": skip_param_init}
"""Initialisation of a weight that will be read from a file."""


def attention_block(config: ConfigJson, rope: RoPE.Config, kernels: KernelConfig, qk_norm: bool) -> dict[str, Any]:
    """The parts of a transformer block before its feed-forward part: attention and both norms."""
    dim, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads")
    if heads % kv_heads:
        config.refuse(f"num_attention_heads = {heads}, not a multiple of num_key_value_heads = {kv_heads}")
    if rope.dim % 2:
        config.refuse(f"heads of {rope.dim} dimensions; rotary embeddings turn pairs of them")
    attention: GQAttention.Config = make_gqa_config(
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=rope.dim,
        wqkv_param_init=READ,
        wo_param_init=READ,
        inner_attention=SegmentAttention.Config(block_q=kernels.attention_block_q, block_kv=kernels.attention_block_kv),
        rope=rope,
        fuse_qkv=False,  # state_dict() of the fused form gathers every layer's projections on every rank
        qk_norm=norm(config, rope.dim) if qk_norm else None,
    )
    return {"attention": attention, "attention_norm": norm(config, dim), "ffn_norm": norm(config, dim)}


def feed_forward(config: ConfigJson) -> FeedForward.Config:
    """SwiGLU."""
    return make_ffn_config(
        dim=config.count("hidden_size"),
        hidden_dim=config.count("intermediate_size"),
        w1_param_init=READ,
        w2w3_param_init=READ,
    )


def norm(config: ConfigJson, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=config.number("rms_norm_eps", 1e-6), param_init=READ)


def decoder_spec(
    name: str,
    config: ConfigJson,
    model: type[Decoder.Config],
    layers: list,
    parallelize: Callable,
    adapter: type[StateDictAdapter] = Qwen3StateDictAdapter,
) -> ModelSpec:
    """The ModelSpec of `layers` between an embedding and an output layer, which may be one tensor."""
    if config.settings.get("quantization_config"):
        config.refuse("a quantization_config; the trainer reads floating-point weights, without scales beside them")
    dim, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    return ModelSpec(
        name=name,
        flavor="config.json",
        model=model(
            vocab_size=vocabulary,
            dim=dim,
            norm=norm(config, dim),
            enable_weight_tying=config.flag("tie_word_embeddings", False),
            tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=READ),
            lm_head=LogprobHead.Config(in_features=dim, out_features=vocabulary, param_init=READ),
            layers=layers,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )
