"""What a model computes on packed rows is what it computes on every sample alone, with shared prompts too."""

from __future__ import annotations

import pytest
import torch
from test_packing import grouped_samples, visible
from tiny_policy import tiny_qwen3, transformers_logprobs

from rl_tpu.trainer.packing import pack
from rl_tpu.types import PackedBatch


def transformers_on_rows(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Log-probability of every label, 0 where there is none, by transformers under the definition of a batch's attention."""
    mask = torch.stack([visible(batch, row) for row in range(batch.rows)]).unsqueeze(1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = model(batch.input_ids, position_ids=batch.positions, attention_mask=additive).logits
    of_label = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(batch.labels >= 0, of_label, 0.0)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_transformers_finds_in_the_rows_what_it_finds_in_each_sample_alone(share_prompts):
    model, samples = tiny_qwen3(True), grouped_samples(8, seed=3)
    batch = pack(samples, [100], share_prompts=share_prompts)
    assert bool(batch.prefix_ids.any()) == share_prompts
    with torch.no_grad():
        found = transformers_on_rows(model, batch)
    for index, sample in enumerate(samples, 1):
        own = (batch.sample_ids == index) & (batch.labels >= 0) & (batch.positions >= len(sample.prompt_ids) - 1)
        alone = torch.tensor(transformers_logprobs(model, sample))
        torch.testing.assert_close(found[own], alone, rtol=1e-5, atol=1e-5)
