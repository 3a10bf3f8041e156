"""Dense Qwen3 of any size."""

from __future__ import annotations

from torchtitan.models.common import CosSinRoPE
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from rl_tpu.config.schema import KernelConfig
from rl_tpu.trainer.families.config_json import ConfigJson
from rl_tpu.trainer.families.decoder import attention_block, decoder_spec, feed_forward

COMPUTED = {"attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0}
"""Settings that the trainer has no counterpart for, and the value it computes with."""
HEAD_DIM = 128
"""Of a config.json that does not name one."""


def model_spec(config: ConfigJson, max_tokens: int, kernels: KernelConfig) -> ModelSpec:
    config.only(COMPUTED)
    config.full_attention()
    rope = default_rope(config, config.count("head_dim", HEAD_DIM), max_tokens)
    layers = [
        Qwen3TransformerBlock.Config(
            **attention_block(config, rope, kernels, qk_norm=True), feed_forward=feed_forward(config)
        )
        for _ in range(config.count("num_hidden_layers"))
    ]
    return decoder_spec("qwen3", config, Qwen3Model.Config, layers, parallelize_qwen3)


def default_rope(config: ConfigJson, head_dim: int, max_tokens: int) -> CosSinRoPE.Config:
    """Rotary embeddings as they were published, for `max_tokens` positions."""
    kind, rope = config.rope()
    if kind != "default":
        config.refuse(f"rotary embeddings of type {kind!r}; {config.architecture} is supported with 'default'")
    return CosSinRoPE.Config(dim=head_dim, max_seq_len=max_tokens, theta=rope.number("rope_theta"))
