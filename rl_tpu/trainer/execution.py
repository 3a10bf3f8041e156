"""The policy's programs run by PyTorch as they are written: eagerly, or with compiled blocks."""

from __future__ import annotations

from typing import Literal

import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.devices import Device
from rl_tpu.trainer.compilations import Compilations
from rl_tpu.trainer.loss import PolicyLoss
from rl_tpu.trainer.microbatch import microbatch_loss
from rl_tpu.trainer.optimizer import PolicyOptimizer
from rl_tpu.trainer.policy import Policy
from rl_tpu.trainer.reference import ReferencePolicy
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch


class EagerExecution:
    """What a rank computes with the policy, micro-batch by micro-batch. Its twin is `graph.execution.GraphExecution`."""

    def __init__(
        self,
        policy: Policy,
        reference: ReferencePolicy | None,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        distribution: Distribution,
        device: Device,
        loss: Literal["policy", "supervised"],
    ):
        self._policy, self._reference = policy, reference
        self._config, self._algorithm, self._distribution, self._device = config, algorithm, distribution, device
        self._loss = PolicyLoss(algorithm) if loss == "policy" else None
        self.compilations = Compilations(config.execution.max_compilations)

    def build_optimizer(self, total_steps: int) -> PolicyOptimizer:
        """The optimizer of the policy's parameters."""
        return PolicyOptimizer(self._policy.model, self._config.optimizer, self._device, total_steps)

    def backward(self, rows: PackedBatch, weights: torch.Tensor, tally: Tally) -> None:
        """Add to the parameters' gradients that of `microbatch_loss`, whose statistics go into `tally`."""
        self._count("backward", rows)
        loss = microbatch_loss(self._policy, rows, weights, self._loss, self._distribution, self._algorithm, tally)
        loss.backward()

    @torch.no_grad()
    def logprobs(self, rows: PackedBatch, *, reference: bool, only_loss: bool) -> torch.Tensor:
        """Log-probabilities of the labels, [R, L] float32; with `only_loss` of those under the loss mask alone. Of the
        policy, or of the reference policy. `reshard` once all rows are through."""
        self._count("reference" if reference else "logprobs", rows)
        model = self._reference if reference else self._policy
        return model.logprobs(rows, self._distribution, only_loss=only_loss)[0]

    def reshard(self) -> None:
        """Free what a forward without a backward left gathered."""
        for model in filter(None, (self._policy, self._reference)):
            model.reshard()

    def _count(self, program: str, rows: PackedBatch) -> None:
        if self._policy.static_shapes:
            self.compilations.need(program, rows.rows, rows.row_tokens)
