"""Model families: one file each, found by the architecture that a Hugging Face config.json names.

A family's module has `model_spec(config, max_tokens)`, torchtitan's ModelSpec for that config.json (a dict) with
rotary embeddings for samples of up to `max_tokens` tokens. It imports torchtitan, hence it is imported by name, after
`prepare_torchtitan`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_tpu.errors import UserError

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

FAMILIES = {
    "Qwen3ForCausalLM": "rl_tpu.trainer.families.qwen3",
}


def model_spec(config: dict[str, Any], max_tokens: int) -> ModelSpec:
    """The spec of the model that `config` describes; UserError with the known architectures if it is none of them."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            try:
                return import_module(FAMILIES[name]).model_spec(config, max_tokens)
            except KeyError as missing:
                raise UserError(f"model.path: config.json has no {missing}, which {name} needs") from missing
    raise UserError(
        f"model.path: architecture {', '.join(names) or '(none named)'} is unknown; known: {', '.join(FAMILIES)}"
    )
