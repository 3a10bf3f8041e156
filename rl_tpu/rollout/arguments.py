"""From a run's configuration to the arguments and the environment of one SGLang server."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import UserError
from rl_tpu.rollout import sglang_cpu
from rl_tpu.rollout.weight_loader import LOADER


def server_environment(config: RunConfig, model_dir: Path, chips: Sequence[int]) -> dict[str, str]:
    """Environment variables of the server. ``chips`` are its chips on its host; empty for those already visible."""
    rollout = config.rollout
    device = get_device(config.cluster.device)
    if not chips and device.chip_resource is None:
        chips = range(rollout.tensor_parallel)
    return {
        # /health says whether the server is up; whether it can generate is /health_generate's business.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        **spare_other_models(model_dir),
        **device.engine_environment(rollout.threads_per_engine, list(chips)),
    }


def server_options(config: RunConfig, model_dir: Path, index: int) -> dict[str, Any]:
    """SGLang's arguments by name for engine number ``index``, without host and port.

    The user's ``rollout.server_options`` come last and win. Raises UserError for a model that SGLang would compute
    otherwise than it is meant.
    """
    refuse_what_is_computed_otherwise(model_dir)
    rollout = config.rollout
    device = get_device(config.cluster.device)
    platform = device.engine_environment(rollout.threads_per_engine).get("SGLANG_PLATFORM")
    return {
        "model_path": str(model_dir),
        "dtype": rollout.dtype,
        "tp_size": rollout.tensor_parallel,
        "context_length": rollout.context_tokens,
        "max_running_requests": rollout.max_running_requests,
        "max_total_tokens": rollout.kv_cache_tokens,
        "random_seed": config.seed + index,
        "weight_version": "0",
        "custom_weight_loader": [LOADER],
        "incremental_streaming_output": True,
        # A model's generation_config.json must not change how requests are sampled.
        "sampling_defaults": "openai",
        "log_level": "warning",
        **(sglang_cpu.SERVER_OPTIONS if platform == sglang_cpu.PLATFORM else {}),
        **device.engine_options(context_tokens=rollout.context_tokens, max_requests=rollout.max_running_requests),
        **rollout.server_options,
    }


def refuse_what_is_computed_otherwise(model_dir: Path) -> None:
    """SGLang 0.5.23 reads over some settings of Qwen3 with experts, and answers from weights that no file has."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError):
        return  # SGLang will say what is wrong with the model
    if not isinstance(config, dict) or "Qwen3MoeForCausalLM" not in (config.get("architectures") or []):
        return
    for name, value in {"mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": False}.items():
        if (found := config.get(name) or value) != value:
            raise UserError(
                f"model.path: SGLang serves Qwen3MoeForCausalLM only with {name} = {value!r}, it is {found!r}"
            )


def spare_other_models(model_dir: Path) -> dict[str, str]:
    """Spare the server the import of the two hundred other models SGLang knows. Empty if ours is not found there."""
    package = importlib.util.find_spec("sglang")
    try:
        architectures = json.loads((model_dir / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError):
        return {}  # SGLang will say what is wrong with the model
    if package is None or package.origin is None:
        return {}
    ours = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    needed = {
        path.stem: bool(ours.search(path.read_text()))
        for path in (Path(package.origin).parent / "srt" / "models").glob("*.py")
    }
    if not any(needed.values()):
        return {}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(name for name in needed if not needed[name]))}
