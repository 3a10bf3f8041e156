"""Reading and writing what a rank holds. Every function here is called by all ranks together.

A checkpoint is a directory of torch's distributed checkpointing: each rank writes and reads its own shards, and another
number of ranks can load it.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from rl_tpu.errors import RunError, UserError

if TYPE_CHECKING:
    from rl_tpu.trainer.optimizer import PolicyOptimizer
    from rl_tpu.trainer.policy import Policy
    from rl_tpu.trainer.reference import ReferencePolicy

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


def load_weights(policy: Policy, directory: Path) -> None:
    """Read the policy alone of what `PolicyCheckpointer.save` wrote; UserError where it is not a checkpoint of this model."""
    weights = policy.model.state_dict()
    try:
        dcp.load(weights, checkpoint_id=str(directory))
    except _BAD_FILES as error:
        raise UserError(f"{directory} is not a checkpoint of this model ({_reason(error)})") from error
    policy.model.load_state_dict(weights, strict=True)


class PolicyCheckpointer:
    """torchtitan's checkpointer over everything a rank holds, writing where it is told to.

    With `background`, `save` only copies what the rank holds, and a thread writes the copy; `finish` says when it is done.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        reference: ReferencePolicy | None = None,
        background: bool = False,
    ):
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        # Where checkpoints lie and how many are kept is the driver's business: a checkpoint of a run is more than these.
        config = CheckpointManager.Config(
            enable=True,
            keep_latest_k=0,
            initial_load_model_only=False,
            async_mode="async" if background else "disabled",
        )
        self._manager = config.build(
            dataloader=None,
            model_parts=[policy.model],
            optimizers=optimizer.optimizer,
            lr_schedulers=optimizer.schedule,
            states={"random": RandomState()},
            sd_adapter=policy.adapter,
        )
        del self._manager.states["dataloader"]
        self._reference = reference
        self._writing: Future | None = None
        self._directory: Path | None = None

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state as they are now into exactly `directory`, after what is still
        being written. Raises RunError where a rank cannot write."""
        self.finish()
        self._directory = directory
        refreshed = self._reference is not None and self._reference.refreshed
        try:
            directory.mkdir(parents=True, exist_ok=True)
            states = {
                name: each.state_dict() if hasattr(each, "state_dict") else each
                for name, each in self._states(refreshed).items()
            }
            writing = self._manager.dcp_save(
                tree_map_only(DTensor, _at_offset_0, states),
                checkpoint_id=str(directory),
                async_mode=self._manager.async_mode,
            )
        except _BAD_FILES as error:
            raise _not_written(self._directory, error) from error
        self._writing = writing if isinstance(writing, Future) else None

    def finish(self, wait: bool = True) -> bool:
        """Whether every byte that this rank was told to save is on disk, of all ranks; with `wait`, once it is.

        Raises RunError where a rank could not write, once for each save.
        """
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except _BAD_FILES as error:
            raise _not_written(self._directory, error) from error
        return True

    def load(self, directory: Path) -> None:
        """Restore exactly what `save` wrote; UserError where the directory is not a checkpoint of this model."""
        self.finish()
        try:
            held = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
            refreshed = self._reference is not None and any(name.startswith("reference.") for name in held)
            self._manager.dcp_load(
                self._states(refreshed), checkpoint_id=str(directory), from_hf=False, from_quantized=False
            )
        except _BAD_FILES as error:
            raise UserError(f"resume: {directory} is not a checkpoint of this model ({_reason(error)})") from error

    def _states(self, reference: bool) -> dict[str, Any]:
        """Everything by name. The reference policy is among it once it is another one than the run started from."""
        states = dict(self._manager.states)
        states = states.pop("model").state_dict() | states
        return states | {"reference": self._reference} if reference else states


class RandomState:
    """torch's generator on the host, which all ranks seed alike."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["torch"].cpu())


def _at_offset_0(tensor: DTensor) -> DTensor:
    """The same tensor. A DTensor whose part lies within a larger tensor claims its place in there, but has no storage: a copy
    of it fails in torch 2.13.0's staging."""
    local = tensor.to_local()
    same = DTensor.from_local(
        local.new_empty(0),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    same._local_tensor = local
    return same


def _not_written(directory: Path, error: BaseException) -> RunError:
    """torch does not say that a disk is full."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    return RunError(f"the checkpoint could not be written ({_reason(error)}; {free:.3g} GB are free in {there})")


def _reason(error: BaseException) -> str:
    """The line that says what went wrong: distributed checkpointing wraps each rank's error in its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
