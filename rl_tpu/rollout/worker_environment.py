"""Environment variables that differ between the workers of one server: SGLang has none of its own for that.

Where each process computes on one device only, it must know which before it touches it.
"""

from __future__ import annotations

import json
import os
from typing import Any

WORKER_ENVIRONMENTS = "RL_TPU_WORKER_ENVIRONMENTS"
"""Environment variable of the server: a JSON list with the variables of every worker, by tensor-parallel rank."""


def register_hooks() -> None:
    """Called in each of SGLang's processes before it starts."""
    if WORKER_ENVIRONMENTS not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The first thing that a worker does with its number, before it makes its scheduler and model.
    HookRegistry.register("sglang.srt.managers.scheduler.configure_scheduler_process", _enter, HookType.BEFORE)


def _enter(server_args: Any, gpu_id: int, *args: Any, **options: Any) -> None:
    os.environ.update(json.loads(os.environ[WORKER_ENVIRONMENTS])[gpu_id])
