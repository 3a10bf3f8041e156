"""Whole steps of TRL's GRPOTrainer: it generates, scores and learns. Runs in the environment of requirements-trl.txt.

Generation goes on until the longest answer of the batch ends, and pads the others. A logits processor ends every answer at
its drawn length and keeps it from ending before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import trl
from datasets import Dataset
from task import ANSWERS, WORKLOADS, digits, lengths
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import BETAS, CLIP_HIGH, CLIP_LOW, LEARNING_RATE, MAX_GRAD_NORM


class DrawnLengths(LogitsProcessor):
    """The end token is all there is where an answer has its length, and never before."""

    def __init__(self, drawn: list[int], prompt_tokens: int, end: int):
        self._drawn, self._prompt_tokens, self._end = torch.tensor(drawn), prompt_tokens, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids.shape[1] - self._prompt_tokens + 1 >= self._drawn
        scores[:, self._end] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self._end] = 0.0
        return scores


class Clock(TrainerCallback):
    """Seconds of whole steps, and of their generation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.generate = 0.0

    def on_train_begin(self, *_, **__):
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.steps.append({"step": now - self.started, "generate": self.generate})
        self.started, self.generate = now, 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = WORKLOADS[options.workload]
    samples = workload.prompts * ANSWERS
    tokenizer = AutoTokenizer.from_pretrained(options.task / "model")
    rows = [json.loads(line) for line in (options.task / "prompts.jsonl").read_text().splitlines()]
    written: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        written.append(sum(map(len, completion_ids)))
        return [digits(completion) for completion in completions]

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
            max_steps=options.steps,
            per_device_train_batch_size=options.micro,
            gradient_accumulation_steps=samples // options.micro,
            num_generations=ANSWERS,
            max_completion_length=workload.longest,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
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
        clock = Clock()
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(
                options.task / "model", dtype=torch.float32, attn_implementation="sdpa"
            ),
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": [row["prompt"] for row in rows]}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        drawn = lengths(options.workload)
        plan: list[int] = []
        model, generate = trainer.model, trainer.model.generate

        def with_lengths(*args, **kwargs):
            plan[:] = itertools.islice(drawn, samples)
            inputs = kwargs.get("input_ids", args[0] if args else None)
            ends = DrawnLengths(plan, inputs.shape[1], tokenizer.eos_token_id)
            return generate(*args, **kwargs, logits_processor=LogitsProcessorList([ends]))

        model.generate = with_lengths
        single_turn = trainer._generate_single_turn

        def timed(*args, **kwargs):
            started = time.perf_counter()
            result = single_turn(*args, **kwargs)
            clock.generate += time.perf_counter() - started
            return result

        trainer._generate_single_turn = timed
        trainer.train()
    expected = list(itertools.islice(lengths(options.workload), samples * options.steps))
    assert sum(written) == sum(expected), (written, sum(expected))
    print(json.dumps({"steps": clock.steps, "tokens": written, "trl": trl.__version__}), flush=True)


if __name__ == "__main__":
    main()
