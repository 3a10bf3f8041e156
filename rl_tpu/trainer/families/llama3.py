"""Llama 3, and what shares its architecture (SmolLM2).

Hugging Face pairs the dimensions of a head (i, i + d/2) for rotation, Meta (2i, 2i + 1), and torchtitan's own adapter
permutes the rows of q and k between the two. Here the model rotates as Hugging Face does, so its weights are those of the
directory as they lie there, and what is published to engines are views of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from rl_tpu.config.schema import KernelConfig
from rl_tpu.trainer.families.config_json import ConfigJson
from rl_tpu.trainer.families.decoder import attention_block, decoder_spec, feed_forward

COMPUTED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rope_interleaved": False,
    "pretraining_tp": 1,
}
"""Settings that the trainer has no counterpart for, and the value it computes with."""


class Llama3RoPE(CosSinRoPE):
    """Rotary embeddings stretched to a longer context, as Llama 3.1 does it ("llama3" in config.json).

    A frequency with more than `high_freq_factor` turns in the original context stays, one with fewer than
    `low_freq_factor` is divided by `scaling_factor`, and between the two it is interpolated by the number of turns.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """cos and sin of every position, [max_seq_len, 2 dim]."""
        rope = self.config
        frequency = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / rope.scaling_factor)
        angle = torch.outer(torch.arange(rope.max_seq_len).float(), frequency).repeat(1, 2)
        return torch.cat([angle.cos(), angle.sin()], -1)


def model_spec(config: ConfigJson, max_tokens: int, kernels: KernelConfig) -> ModelSpec:
    config.only(COMPUTED)
    config.full_attention()
    rope = _rope(config, max_tokens)
    layers = [
        Llama3TransformerBlock.Config(
            **attention_block(config, rope, kernels, qk_norm=False), feed_forward=feed_forward(config)
        )
        for _ in range(config.count("num_hidden_layers"))
    ]
    return decoder_spec("llama3", config, Llama3Model.Config, layers, parallelize_llama)


def _rope(config: ConfigJson, max_tokens: int) -> CosSinRoPE.Config:
    kind, rope = config.rope()
    head_dim = config.count("head_dim", config.count("hidden_size") // config.count("num_attention_heads"))
    sizes = {"dim": head_dim, "max_seq_len": max_tokens, "theta": rope.number("rope_theta", 10000.0)}
    if kind == "default":
        return CosSinRoPE.Config(**sizes)
    if kind != "llama3":
        config.refuse(
            f"rotary embeddings of type {kind!r}; {config.architecture} is supported with 'default', 'llama3'"
        )
    return Llama3RoPE.Config(
        **sizes,
        scaling_factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )
