"""The engine's log-probabilities and the trainer's are of the same distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch, Sample, SamplingParams

PROMPTS = [[40, 41, 42, 43], [17], list(range(100, 160))]


def trainer_logprobs(model_dir: Path, batch: PackedBatch, distribution: Distribution) -> torch.Tensor:
    config = TrainerConfig(steps=1, row_tokens=[256], param_dtype="float32")
    trainer = PolicyTrainer(config, AlgorithmConfig(), model_dir, distribution=distribution)
    try:
        return trainer.logprobs(batch)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "distribution",
    [Distribution(0.6), Distribution(1.0, top_p=0.9), Distribution(0.8, top_k=20), Distribution(1.2, 0.9, 20)],
    ids=["temperature", "top_p", "top_k", "all"],
)
def test_what_was_sampled_has_the_same_logprobs_in_the_trainer(engine, model_dirs, run, distribution):
    params = SamplingParams(24, distribution.temperature, distribution.top_p, distribution.top_k, seed=3)
    samples = [
        Sample(
            prompt_ids=prompt,
            response_ids=completion.response_ids,
            loss_mask=[1] * len(completion.response_ids),
            logprobs=completion.logprobs,
            spans=completion.spans,
            finish_reason=completion.finish_reason,
        )
        for prompt in PROMPTS
        for completion in run(engine.generate(prompt, params, 4))
    ]
    batch = pack(samples, [256], share_prompts=True)
    logprobs, whole = (trainer_logprobs(model_dirs["untied"], batch, each) for each in (distribution, Distribution()))
    sampled = batch.loss_mask > 0
    assert sampled.sum() == sum(len(sample.response_ids) for sample in samples)
    torch.testing.assert_close(logprobs[sampled], batch.sampler_logprobs[sampled], rtol=0, atol=1e-4)
    assert (whole - logprobs)[sampled].abs().max() > 0.01  # so that the distribution matters here
