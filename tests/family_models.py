"""Tiny models of every family, made with transformers, which is the second source of their numbers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
# Frequencies of all three kinds at these sizes: kept, divided, between the two.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, **EXPERTS},
    # Weights of the chosen experts as softmax gave them.
    "qwen3_moe plain scores": {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": False},
    # Dense, experts, dense, experts but for one.
    "qwen3_moe mixed tied": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "norm_topk_prob": False,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "tie_word_embeddings": True,
    },
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama tied, long context": {
        "model_type": "llama",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
    },
}


def family_model(name: str, vocabulary: int = 257, **more: Any) -> PreTrainedModel:
    """In float32, with weights and norms far enough from their initial values that a mistake shows."""
    torch.manual_seed(len(name))
    settings = SIZES | {"vocab_size": vocabulary} | MODELS[name] | more
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in parameter_name else parameter.normal_(0, 0.08)
    return model


def by_saved_name(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that are named as the model's parameters, by the names of its files: there, experts are one by one."""
    return dict(revert_weight_conversion(model, tensors))
