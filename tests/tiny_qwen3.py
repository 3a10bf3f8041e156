"""The shape of the tiny Qwen3 that tests use: two layers, hidden size 64."""

from typing import Any

from transformers import Qwen3Config


def tiny_config(vocabulary: int, tied: bool, **more: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        **more,
    )
