"""Dense Qwen3, with tied or untied embeddings, from a Hugging Face config.json."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, _build_qwen3_layers, _qwen3_norm, parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from rl_tpu.errors import UserError
from rl_tpu.trainer.attention import DocumentAttention

READ = {"weight": skip_param_init}
"""Initialisation of a weight that will be read from a file."""

# Settings of a config.json that torchtitan's Qwen3 has no counterpart for, and the value it computes with.
FIXED = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0}


def model_spec(config: dict[str, Any], max_tokens: int) -> ModelSpec:
    """torchtitan's Qwen3 for `config`; UserError where the config asks for something that it does not compute."""
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise UserError(f"model.path: config.json has {key} = {config[key]!r}; the trainer supports only {value!r}")
    dim, vocabulary, tied = config["hidden_size"], config["vocab_size"], config.get("tie_word_embeddings", False)
    head_dim = config.get("head_dim", 128)
    layers = _build_qwen3_layers(
        n_layers=config["num_hidden_layers"],
        dim=dim,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        hidden_dim=config["intermediate_size"],
        fuse_qkv=False,  # state_dict() of the fused form gathers every layer's projections on every rank
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_tokens, theta=_rope_theta(config)),
    )
    norm = _qwen3_norm(dim)
    for layer in layers:
        layer.attention.inner_attention = DocumentAttention.Config()
        for part in (layer.attention.qk_norm, layer.attention_norm, layer.ffn_norm, norm):
            part.eps = config.get("rms_norm_eps", 1e-6)
    model = Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=norm,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=READ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=READ),
        layers=layers,
    )
    return ModelSpec(
        name="qwen3",
        flavor="config.json",
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def _rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary embedding; config.json names it in one of two places, by the version that wrote it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"model.path: config.json asks for rotary embeddings of type {kind!r}; supported: 'default'")
    return float(rope.get("rope_theta") or config["rope_theta"])
