"""A training step of TRL's GRPOTrainer on the same batch. Runs in the environment of requirements-trl.txt.

A rollout function hands the trainer the batch instead of generating; what it does with it (padding, scoring, loss,
optimizer) is its own. Its time is that of a whole step, without the rollout and the scoring of rewards.
"""

from __future__ import annotations

import os
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import (
    ANSWERS,
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MODEL,
    arguments,
    batch,
    report,
    reset_peak_memory,
    tokens,
)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of one word per id: the batch is ids already."""
    vocabulary = {f"t{index}": index for index in range(MODEL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1", padding_side="left")


class Clock(TrainerCallback):
    """Seconds of every step, less what the trainer spent on obtaining the batch."""

    def __init__(self, warmup: int):
        self.seconds: list[float] = []
        self.warmup, self.elsewhere = warmup, 0.0

    def on_train_begin(self, *_, **__):
        self.started, self.memory_before = time.perf_counter(), reset_peak_memory()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.seconds.append(now - self.started - self.elsewhere)
        self.started, self.elsewhere = now, 0.0

    def leave_out(self, function):
        def timed(*args, **kwargs):
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.elsewhere += time.perf_counter() - started
            return result

        return timed


def main() -> None:
    parser = arguments()
    parser.add_argument("--micro", type=int, default=32, help="samples in one forward and backward")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answers = batch(options.workload)
    groups = [answers[start : start + ANSWERS] for start in range(0, len(answers), ANSWERS)]
    texts = [" ".join(f"t{token}" for token in group[0].prompt) for group in groups]
    by_prompt = dict(zip(texts, groups, strict=True))

    def rollout(prompts: list[str], _: GRPOTrainer) -> dict:
        # The trainer repeats every prompt; its answers are handed out in their order.
        seen: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            chosen.append(by_prompt[prompt][seen.setdefault(prompt, 0)])
            seen[prompt] += 1
        return {
            "prompt_ids": [answer.prompt for answer in chosen],
            "completion_ids": [answer.response for answer in chosen],
            "logprobs": None,
            "score": [answer.reward for answer in chosen],
        }

    def reward(completions: list[str], score: list[float], **_) -> list[float]:
        assert len(completions) == len(answers), len(completions)
        return score

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            fp16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            max_steps=options.warmup + options.steps,
            per_device_train_batch_size=options.micro,
            gradient_accumulation_steps=len(answers) // options.micro,
            num_generations=ANSWERS,
            max_completion_length=256,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=MAX_GRAD_NORM,
            optim="adamw_torch",
            beta=0.0,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            gradient_checkpointing=False,
            seed=0,
        )
        clock = Clock(options.warmup)
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa"),
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=words(),
            callbacks=[clock],
            rollout_func=rollout,
        )
        trainer._generate_and_score_completions = clock.leave_out(trainer._generate_and_score_completions)
        trainer.train()
    report(
        clock.seconds[options.warmup :],
        clock.memory_before,
        options,
        gradient_norm=float(trainer.state.log_history[0]["grad_norm"]),
        tokens=tokens(answers),
        trl=trl.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
