"""From a run's configuration to the arguments of one SGLang server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.rollout.weight_loader import LOADER


def server_options(config: RunConfig, model_dir: Path, index: int) -> dict[str, Any]:
    """SGLang's arguments by name for engine number ``index``, without host and port.

    The user's ``rollout.server_options`` come last and win.
    """
    rollout = config.rollout
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
        # A model's generation_config.json must not change how requests are sampled.
        "sampling_defaults": "openai",
        "log_level": "warning",
        **get_device(config.cluster.device).engine_options(),
        **rollout.server_options,
    }


def server_arguments(options: dict[str, Any]) -> list[str]:
    """The command line. A true option is a flag of its own; false and None mean SGLang's default."""
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            arguments.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            arguments += map(str, value)
        elif value is not True:
            arguments.append(str(value))
    return arguments
