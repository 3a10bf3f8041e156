"""A tiny random Qwen3 with a tokenizer, its configuration, and transformers as the second source of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_qwen3 import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rl_tpu.config.schema import RunConfig

VOCABULARY = 301  # SGLang fills it up to 320 rows
END = 2


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_model(path: Path, seed: int, tied: bool) -> None:
    """Write a float32 model whose weights are wide enough for distributions far from uniform."""
    torch.manual_seed(seed)
    more = {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.15}
    config = tiny_config(VOCABULARY, tied, max_position_embeddings=2048, **more)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def make_config(model_dir: Path, rollout: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    fields = {
        "name": "test",
        "model": {"path": str(model_dir)},
        "data": {"train": {"kind": "file", "path": "unused.jsonl"}},
        "reward": {"name": "math"},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_response_tokens": 8,
            "context_tokens": 1024,
            "kv_cache_tokens": 16384,
            "max_running_requests": 64,
            "dtype": "float32",
            "start_timeout_s": 300,
            "request_timeout_s": 60,
            **(rollout or {}),
        },
        "trainer": {"steps": 1},
        "cluster": {"device": "cpu", "chips_per_host": 4, "trainer_chips": 1, "rollout_chips": 3},
        **sections,
    }
    return RunConfig.model_validate(fields)


def load_model(path: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def weights_of(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """What an exporter sends: every parameter by its Hugging Face name, a tied one once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


@torch.no_grad()
def reference_logits(model: Qwen3ForCausalLM, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits [response tokens, vocabulary] that each token of the response is drawn from."""
    logits = model(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1]


def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    logits = reference_logits(model, prompt, response) / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
