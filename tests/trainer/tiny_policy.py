"""Tiny Qwen3 models, their transformers twins, samples to train on, and a trainer in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_qwen3 import tiny_config
from transformers import PreTrainedModel, Qwen3ForCausalLM

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig, RunConfig, TrainerConfig
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch, Sample, VersionSpan

VOCABULARY = 257  # odd: two ranks hold unequal shares of the embedding


def tiny_qwen3(tied: bool, vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """Two layers, with weights and norms far enough from their initial values that a mistake shows."""
    torch.manual_seed(tied)
    config = tiny_config(vocabulary, tied, max_position_embeddings=512, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0, 0.08)
    return model


@contextmanager
def one_rank(
    model_dir: Path, algorithm: AlgorithmConfig | None = None, microbatch_tokens: int = 128, **options: Any
) -> Iterator[PolicyTrainer]:
    """A trainer that is the only rank, in this process. `options` are settings of its configuration, or its own."""
    settings = {name: options.pop(name) for name in list(options) if name in TrainerConfig.model_fields}
    config = trainer_config(microbatch_tokens, **settings)
    trainer = PolicyTrainer(config, algorithm or AlgorithmConfig(), model_dir, **options)
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def learning(config: RunConfig, model_dir: Path) -> Iterator[PolicyTrainer]:
    """The one rank of a run with `config`, in this process."""
    rollout = config.rollout
    trainer = PolicyTrainer(
        config.trainer,
        config.algorithm,
        model_dir,
        distribution=Distribution(rollout.temperature, rollout.top_p, rollout.top_k),
        max_response_tokens=rollout.max_response_tokens,
    )
    try:
        yield trainer
    finally:
        trainer.close()


class OneRank:
    """What the driver asks of the trainer, answered by the one rank in this process."""

    def __init__(self, trainer: PolicyTrainer):
        self._trainer = trainer

    async def logprobs(self, batches: Sequence[PackedBatch], *, reference: bool = False) -> list[torch.Tensor]:
        return [self._trainer.logprobs(batch, reference=reference, only_loss=True) for batch in batches]


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """The gradient of every parameter on one rank, in Hugging Face's names."""
    of = {name: parameter.grad for name, parameter in trainer.policy.model.named_parameters()}
    return trainer.policy.adapter.to_hf({name: gradient for name, gradient in of.items() if gradient is not None})


def trainer_config(microbatch_tokens: int = 128, **options: Any) -> TrainerConfig:
    optimizer = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)
    return TrainerConfig(
        **{"steps": 10, "row_tokens": [64, 128], "param_dtype": "float32", "optimizer": optimizer}
        | {"microbatch_tokens": microbatch_tokens}
        | options
    )


def make_samples(count: int, seed: int = 0, longest: int = 60) -> list[Sample]:
    """Random samples of unequal length; some response tokens belong to the environment."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt, response = draw.randint(1, longest // 3), draw.randint(1, 2 * longest // 3)
        mask = [int(draw.random() < 0.8) for _ in range(response)]
        samples.append(
            Sample(
                prompt_ids=[draw.randrange(VOCABULARY) for _ in range(prompt)],
                response_ids=[draw.randrange(VOCABULARY) for _ in range(response)],
                loss_mask=mask,
                logprobs=[draw.uniform(-7, -3) for _ in range(response)],
                spans=[VersionSpan(0, 0, response)],
                finish_reason="stop",
                advantage=draw.gauss(0, 1),
            )
        )
    return samples


def response_logprobs(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probability of every response token, one sample at a time, without packing."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(ids).logits[0]
    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    first = len(sample.prompt_ids)
    return table[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]


def transformers_logprobs(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> list[float]:
    """`response_logprobs` as numbers."""
    with torch.no_grad():
        return response_logprobs(model, sample, temperature).tolist()


def supervised_loss(model: PreTrainedModel, samples: Sequence[Sample]) -> torch.Tensor:
    """transformers' mean cross-entropy of the tokens under the loss masks."""
    total = sum((response_logprobs(model, s) * torch.tensor(s.loss_mask)).sum() for s in samples)
    return -total / sum(sum(sample.loss_mask) for sample in samples)


def predictions(batch: PackedBatch, index: int, sample: Sample) -> tuple[int, slice]:
    """Row and places where the batch predicts the response of its sample `index`."""
    row, place = (batch.sample_ids == index + 1).nonzero()[-1].tolist()
    return row, slice(place - len(sample.response_ids), place)
