"""The output layer as a torchtitan module that returns log-probabilities instead of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.logprobs import CHUNK_LOGITS, VocabularyShard, hidden_logprobs
from rl_tpu.errors import UserError
from rl_tpu.trainer.kernels.fused_logprobs import fused_logprobs

STATIC_CHUNK_LOGITS = 1 << 27
"""Logits worked on at a time where every chunk becomes a part of the program (512 MiB in float32)."""


class LogprobHead(Linear):
    """A module, so that whatever shards its weight gathers it for the call. Under tensor parallelism the weight stays
    divided along the vocabulary. The name of the first argument is that of torchtitan's linear layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        tiles: tuple[int, int] | None = None
        """Tokens and vocabulary entries per tile of rl_tpu::fused_logprobs, which computes it all; None: chunks do."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.tiles = config.tiles

    def forward(
        self,
        input: torch.Tensor,
        places: torch.Tensor | None,
        labels: torch.Tensor,
        distribution: Distribution,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [R, L, D], of which those at `places` [N] (counted through all rows; None: all) predict `labels`
        [N] -> log-probabilities and entropies, both [N], as `hidden_logprobs`.

        Raises UserError for a truncated distribution where the head is fused."""
        weight, shard = self.weight, None
        if isinstance(weight, DTensor):
            group, size = weight.device_mesh.get_group(), -(-self.out_features // weight.device_mesh.size())
            shard = VocabularyShard(group.rank() * size, self.out_features, group)
            weight, input = weight.to_local(), input.to_local(grad_placements=[Partial()])
        hidden = input.flatten(0, 1)
        if places is not None:
            hidden = hidden.index_select(0, places)
        if self.tiles is None:
            return hidden_logprobs(
                hidden,
                weight,
                labels,
                distribution,
                entropy_gradient=entropy_gradient,
                shard=shard,
                chunk_logits=CHUNK_LOGITS if places is not None else STATIC_CHUNK_LOGITS,
            )
        if distribution.truncated:
            raise UserError(
                f"trainer.kernels.head: fused computes the whole softmax, not rollout.top_p={distribution.top_p},"
                f" top_k={distribution.top_k} and min_p={distribution.min_p}; use head plain, or top_p 1, top_k -1, min_p 0"
            )
        logprobs, entropy, _ = fused_logprobs(hidden, weight, labels, distribution.temperature, *self.tiles)
        return logprobs, entropy if entropy_gradient else entropy.detach()
