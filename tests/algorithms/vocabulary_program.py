"""What each of two ranks does in test_logprobs.py: `python vocabulary_program.py RANK OUT_DIR`."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from test_logprobs import DISTRIBUTIONS, V, inputs, results

from rl_tpu.algorithms.logprobs import VocabularyShard, hidden_logprobs

if __name__ == "__main__":
    rank, out = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    hidden, weight, labels = inputs()
    own = weight.split(-(-V // 2))[rank]
    shard = VocabularyShard(rank * -(-V // 2), V, dist.group.WORLD)

    def divided(*arguments):
        return hidden_logprobs(*arguments, entropy_gradient=True, shard=shard, chunk_logits=5 * V)

    found = {
        name: results(divided, hidden, own, labels, distribution, entropy_gradient=True)
        for name, distribution in DISTRIBUTIONS.items()
    }
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()
