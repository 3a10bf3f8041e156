"""The policy on one rank: log-probabilities of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.trainer.inputs import all_positions, without_padding
from rl_tpu.types import PackedBatch


@dataclass(frozen=True)
class Policy:
    """The model on this rank, and how its parameters are called in Hugging Face's names.

    `model` maps tokens [R, L], positions [R, L] and attention_masks (SegmentAttention's) to hidden states [R, L, D], from
    which its lm_head, a LogprobHead, makes log-probabilities. Its parameters are in float32; on several ranks they are
    DTensors, divided as `mesh` says.
    """

    model: torch.nn.Module
    adapter: BaseStateDictAdapter
    device: torch.device
    mesh: ParallelDims
    static_shapes: bool = False
    """No shape depends on the data: rows are computed as they are, padding included, for a device that compiles one
    program per shape, or for a capture."""
    splash: bool = False
    """With static shapes: attention is splash attention."""

    def __post_init__(self):
        self.model._skip_lm_head = True

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks whose rows differ, seen from this one; None where it sees all of them."""
        return self.mesh.get_mesh("loss").get_group() if self.mesh.dp_enabled else None

    def logprobs(
        self, rows: PackedBatch, distribution: Distribution, *, only_loss: bool = False, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every label under `distribution`, and entropy of the distributions, both [R, L] float32.

        With `only_loss` they are those of the tokens under the loss mask alone. Elsewhere both are 0. The entropy carries
        a gradient only with `entropy_gradient`.
        """
        rows = rows.to(self.device)
        wanted = rows.labels >= 0
        if only_loss:
            wanted &= rows.loss_mask > 0
        if self.static_shapes:
            inputs = all_positions(rows, wanted, self.splash)
        else:
            inputs = without_padding(rows, wanted, self.mesh.tp)
        hidden = self.model(inputs.tokens, positions=inputs.positions, attention_masks=inputs.attention)
        found = self.model.lm_head(hidden, inputs.places, inputs.labels, distribution, entropy_gradient)
        logprobs, entropy = (inputs.spread(values).view_as(wanted) for values in found)
        return logprobs, torch.where(wanted, entropy, 0.0)

    def reshard(self) -> None:
        """Free the gathered weights. After a forward without a backward FSDP2 leaves its last group's in place."""
        for module in fsdp_modules(self.model):
            module.reshard()


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
