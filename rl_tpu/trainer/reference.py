"""The frozen policy that the trained one is kept close to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import TrainerConfig
from rl_tpu.devices import Device
from rl_tpu.trainer import checkpoint
from rl_tpu.trainer.model import build_policy
from rl_tpu.trainer.policy import Policy
from rl_tpu.types import PackedBatch


class ReferencePolicy:
    """The policy of `model_dir` in `param_dtype`, laid out over the ranks as `policy` is; without gradients, and with
    `offload_reference` in host memory but for the layer that computes."""

    def __init__(self, policy: Policy, model_dir: Path, device: Device, config: TrainerConfig):
        self._policy = build_policy(model_dir, device, policy.device, config, mesh=policy.mesh, frozen=True)
        checkpoint.load_hf(self._policy, model_dir)
        self.refreshed = False
        """Whether it is another policy than that of `model_dir`, which a checkpoint then has to hold."""

    @property
    def model(self) -> torch.nn.Module:
        """Its model."""
        return self._policy.model

    @torch.no_grad()
    def logprobs(
        self, rows: PackedBatch, distribution: Distribution, *, only_loss: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Policy.logprobs`. `reshard` once all rows are through."""
        return self._policy.logprobs(rows, distribution, only_loss=only_loss)

    def reshard(self) -> None:
        """Free the gathered weights."""
        self._policy.reshard()

    @torch.no_grad()
    def refresh_from(self, policy: Policy) -> None:
        """Become what `policy` is now."""
        theirs = policy.model.state_dict()
        for name, ours in self._policy.model.state_dict().items():
            local(ours).copy_(local(theirs[name]))
        self.refreshed = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Its weights, for a checkpoint."""
        return dict(self._policy.model.state_dict())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become what `state_dict` was taken of."""
        self._policy.model.load_state_dict(state, strict=True)
        self.refreshed = True


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: equal layouts hold equal parts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
