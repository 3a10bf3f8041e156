"""The output layer as a torchtitan module that returns log-probabilities instead of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.logprobs import VocabularyShard, hidden_logprobs


class LogprobHead(Linear):
    """A module, so that whatever shards its weight gathers it for the call. Under tensor parallelism the weight stays
    divided along the vocabulary. The name of the first argument is that of torchtitan's linear layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self,
        input: torch.Tensor,
        places: torch.Tensor,
        labels: torch.Tensor,
        distribution: Distribution,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [R, L, D], of which those at `places` [N] (counted through all rows) predict `labels` [N] ->
        log-probabilities and entropies, both [N], as `hidden_logprobs`."""
        weight, shard = self.weight, None
        if isinstance(weight, DTensor):
            group, size = weight.device_mesh.get_group(), -(-self.out_features // weight.device_mesh.size())
            shard = VocabularyShard(group.rank() * size, self.out_features, group)
            weight, input = weight.to_local(), input.to_local(grad_placements=[Partial()])
        hidden = input.flatten(0, 1).index_select(0, places)
        return hidden_logprobs(hidden, weight, labels, distribution, entropy_gradient=entropy_gradient, shard=shard)
