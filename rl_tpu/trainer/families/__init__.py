"""Model families: one file each, found by the architecture that a Hugging Face config.json names.

A family's module has `model_spec(config, max_tokens, kernels)`, torchtitan's ModelSpec for that config.json with rotary
embeddings for samples of up to `max_tokens` tokens, whose parts compute as the KernelConfig `kernels` says. It imports
torchtitan, hence it is imported by name, after `prepare_torchtitan`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_tpu.config.schema import KernelConfig
from rl_tpu.errors import UserError
from rl_tpu.trainer.families.config_json import ConfigJson

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

FAMILIES = {
    "LlamaForCausalLM": "rl_tpu.trainer.families.llama3",
    "Qwen3ForCausalLM": "rl_tpu.trainer.families.qwen3",
    "Qwen3MoeForCausalLM": "rl_tpu.trainer.families.qwen3_moe",
}


def model_spec(config: dict[str, Any], max_tokens: int, kernels: KernelConfig | None = None) -> ModelSpec:
    """The spec of the model that `config` describes, by default without kernels; UserError with the known architectures
    if it is none of them."""
    names = config.get("architectures") if isinstance(config, dict) else None
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for name in names:
        if name in FAMILIES:
            family = import_module(FAMILIES[name])
            return family.model_spec(ConfigJson(config, name), max_tokens, kernels or KernelConfig())
    raise UserError(
        f"model.path: architecture {', '.join(names) or '(none named)'} is unknown; known: {', '.join(FAMILIES)}; "
        "another is a file in rl_tpu/trainer/families and a line in its FAMILIES (docs/models.md)"
    )
