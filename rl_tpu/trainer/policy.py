"""The policy on one rank: log-probabilities of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from rl_tpu.algorithms.logprobs import label_logprobs
from rl_tpu.trainer.attention import document_mask
from rl_tpu.types import PackedBatch


@dataclass(frozen=True)
class Policy:
    """The model on this rank, and how its parameters are called in Hugging Face's names.

    `model` maps input_ids [R, L], positions [R, L] and attention_masks [R, 1, L, L] to logits [R, L, vocabulary]. Its
    parameters are DTensors in float32, split over the ranks along their first dimension.
    """

    model: torch.nn.Module
    adapter: BaseStateDictAdapter
    device: torch.device
    mesh: ParallelDims

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks whose rows differ, seen from this one; None where it sees all of them."""
        return self.mesh.get_mesh("loss").get_group() if self.mesh.dp_enabled else None

    def logprobs(self, rows: PackedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every label (0 where there is none) and entropy of every prediction, both [R, L] float32,
        under softmax(logits / temperature). The entropy carries no gradient."""
        mask = document_mask(rows.segment_ids)
        logits = self.model(rows.input_ids, positions=rows.positions, attention_masks=mask)
        return label_logprobs(logits, rows.labels, temperature)

    def reshard(self) -> None:
        """Free the gathered weights. After a forward without a backward FSDP2 leaves its last group's in place."""
        for module in fsdp_modules(self.model):
            module.reshard()


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
