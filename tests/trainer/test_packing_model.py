"""What a model computes on packed rows is what it computes on every sample alone, with shared prompts too."""

from __future__ import annotations

import pytest
import torch
from test_packing import grouped_samples, visible
from tiny_policy import one_rank, tiny_qwen3, transformers_logprobs

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.trainer.packing import pack, shared_share
from rl_tpu.types import PackedBatch, Sample


def transformers_on_rows(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Log-probability of every label, 0 where there is none, by transformers under the definition of a batch's attention."""
    mask = torch.stack([visible(batch, row) for row in range(batch.rows)]).unsqueeze(1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = model(batch.input_ids, position_ids=batch.positions, attention_mask=additive).logits
    of_label = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(batch.labels >= 0, of_label, 0.0)


def of_samples(values: torch.Tensor, batch: PackedBatch, samples: list[Sample]) -> list[torch.Tensor]:
    """What `values` [R, L] has for the response tokens of each sample."""
    return [
        values[(batch.labels >= 0) & (batch.sample_ids == index) & (batch.positions >= len(sample.prompt_ids) - 1)]
        for index, sample in enumerate(samples, 1)
    ]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_transformers_finds_in_the_rows_what_it_finds_in_each_sample_alone(share_prompts):
    model, samples = tiny_qwen3(True), grouped_samples(8, seed=3)
    batch = pack(samples, [100], share_prompts=share_prompts)
    assert bool(batch.prefix_ids.any()) == share_prompts
    with torch.no_grad():
        found = transformers_on_rows(model, batch)
    for of_sample, sample in zip(of_samples(found, batch, samples), samples, strict=True):
        alone = torch.tensor(transformers_logprobs(model, sample))
        torch.testing.assert_close(of_sample, alone, rtol=1e-5, atol=1e-5)


def test_the_policy_finds_with_shared_prompts_what_it_finds_without(model_dir):
    samples = grouped_samples(12, seed=5)
    found = []
    with one_rank(model_dir) as trainer:
        for share_prompts in (False, True):
            batch = pack(samples, [128], share_prompts=share_prompts)
            assert (shared_share(batch) > 0.1) == share_prompts
            trainer.policy.model.zero_grad()
            logprobs, entropy = trainer.policy.logprobs(batch, Distribution(), entropy_gradient=True)
            (batch.advantages * logprobs + 0.1 * batch.loss_mask * entropy).sum().backward()
            found.append(
                (
                    of_samples(logprobs.detach(), batch, samples),
                    of_samples(entropy.detach(), batch, samples),
                    {name: weight.grad for name, weight in trainer.policy.model.named_parameters()},
                )
            )
    (logprobs, entropies, grads), (shared_logprobs, shared_entropies, shared_grads) = found
    for plain, shared in zip(logprobs + entropies, shared_logprobs + shared_entropies, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    for name, plain in grads.items():
        torch.testing.assert_close(shared_grads[name], plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
