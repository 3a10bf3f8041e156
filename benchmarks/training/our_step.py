"""A training step of rl_tpu: packing and PolicyTrainer.update, on one rank in this process."""

from __future__ import annotations

from dataclasses import replace

from workload import (
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Answer,
    arguments,
    batch,
    measure,
    tokens,
)

from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch, Sample, VersionSpan


def sample(answer: Answer) -> Sample:
    length = len(answer.response)
    return Sample(
        prompt_ids=answer.prompt,
        response_ids=answer.response,
        loss_mask=[1] * length,
        logprobs=[0.0] * length,
        spans=[VersionSpan(0, 0, length)],
        finish_reason="stop",
        reward=answer.reward,
        advantage=answer.advantage,
    )


def main() -> None:
    parser = arguments()
    parser.add_argument("--microbatch-tokens", type=int, default=2560)
    parser.add_argument("--share-prompts", action="store_true")
    options = parser.parse_args()
    config = TrainerConfig(
        steps=1000,
        row_tokens=[options.microbatch_tokens],
        share_prompts=options.share_prompts,
        param_dtype="float32",
        threads_per_rank=options.threads,
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM
        ),
    )
    algorithm = AlgorithmConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    trainer = PolicyTrainer(config, algorithm, options.model)
    answers = batch(options.workload)
    samples = [sample(answer) for answer in answers]

    def packed() -> PackedBatch:
        return pack(samples, config.row_tokens, share_prompts=config.share_prompts)

    # The policy wrote its batch itself, as when nothing is stale.
    rows = packed()
    sampled = trainer.logprobs(rows) * rows.loss_mask

    def step() -> float:
        return trainer.update(replace(packed(), sampler_logprobs=sampled, old_logprobs=sampled))["train/grad_norm"]

    measure(step, options, tokens=tokens(answers), computed_tokens=int((rows.segment_ids > 0).sum()))
    trainer.close()


if __name__ == "__main__":
    main()
