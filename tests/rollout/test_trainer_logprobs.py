"""The engine's log-probabilities and the trainer's are of the same distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_config

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.rollout.sglang import SGLangEngine
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
    check(engine, model_dirs["untied"], run, distribution)


@pytest.mark.slow
def test_min_p_where_sampling_is_not_seeded(model_dirs, local_ray, run, tmp_path):
    """An engine of its own: SGLang has no min_p in seeded sampling."""
    model_dir = model_dirs["untied"]
    config = make_config(model_dir, rollout={"server_options": {"enable_deterministic_inference": False}})
    engine = run(SGLangEngine.start(config, model_dir, tmp_path, 0, {"num_cpus": 0}))
    try:
        check(engine, model_dir, run, Distribution(1.2, min_p=0.05))
        check(engine, model_dir, run, Distribution(1.2, top_p=0.9, top_k=20, min_p=0.05))
    finally:
        run(engine.close())


def check(engine, model_dir, run, distribution):
    settings = (distribution.temperature, distribution.top_p, distribution.top_k, distribution.min_p)
    params = SamplingParams(24, *settings, seed=3)
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
    logprobs, whole = (trainer_logprobs(model_dir, batch, each) for each in (distribution, Distribution()))
    sampled = batch.loss_mask > 0
    assert sampled.sum() == sum(len(sample.response_ids) for sample in samples)
    torch.testing.assert_close(logprobs[sampled], batch.sampler_logprobs[sampled], rtol=0, atol=1e-4)
    assert (whole - logprobs)[sampled].abs().max() > 0.01  # so that the distribution matters here
