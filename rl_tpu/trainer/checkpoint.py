"""Reading and writing what a rank holds. Every function here is called by all ranks together.

A checkpoint is a directory of torch's distributed checkpointing: each rank writes and reads its own shards, and another
number of ranks can load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from rl_tpu.errors import UserError

if TYPE_CHECKING:
    from rl_tpu.trainer.model import Policy

# What distributed checkpointing raises for files that are missing, broken or of another model.
_BAD_FILES = (CheckpointException, OSError, ValueError, RuntimeError)


def load_hf(policy: Policy, model_dir: Path) -> None:
    """Read the safetensors of a Hugging Face directory into the policy; UserError where a tensor is missing or misfits."""
    weights = policy.adapter.to_hf(policy.model.state_dict())
    try:
        dcp.load(weights, storage_reader=policy.adapter.get_hf_storage_reader(str(model_dir)))
    except _BAD_FILES as error:
        raise UserError(f"model.path: cannot load the weights of {model_dir} ({_reason(error)})") from error
    policy.model.load_state_dict(policy.adapter.from_hf(weights), strict=True)


def save(directory: Path, policy: Policy, states: dict[str, Any]) -> None:
    """Write the model and `states` (objects with state_dict and load_state_dict, by name) into exactly `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    dcp.save({"model": policy.model.state_dict(), **states, "random": RandomState()}, checkpoint_id=str(directory))


def load(directory: Path, policy: Policy, states: dict[str, Any]) -> None:
    """Restore exactly what `save` wrote; UserError where the directory is not a checkpoint of this model."""
    model = policy.model.state_dict()
    try:
        dcp.load({"model": model, **states, "random": RandomState()}, checkpoint_id=str(directory))
    except _BAD_FILES as error:
        raise UserError(f"resume: {directory} is not a checkpoint of this model ({_reason(error)})") from error
    policy.model.load_state_dict(model, strict=True)


class RandomState:
    """torch's generator on the host, which all ranks seed alike."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["torch"].cpu())


def _reason(error: BaseException) -> str:
    """The line that says what went wrong: distributed checkpointing wraps each rank's error in its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
