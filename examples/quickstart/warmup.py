"""Makes the quickstart's starting policy: a tiny Qwen3 with its own tokenizer, warmed up on demonstrations.

    python examples/quickstart/warmup.py --out DIRECTORY

First the policy sees sums of one-digit numbers worked out line by line. Then it sees how most people answer: three of
four blurt out a number, which is seldom right. It imitates both in the same proportion, and nothing in the demonstrations
says which way is better: that is left to reinforcement learning. Problems of the held-out part are never shown.

The result is a Hugging Face directory: the same bytes for the same arguments on one machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rl_tpu.config.schema import OptimizerConfig, PromptSourceConfig, TrainerConfig
from rl_tpu.data import load_prompts
from rl_tpu.types import Prompt, Sample, VersionSpan

sys.path.append(str(Path(__file__).parents[1]))  # what the examples share

from tiny_model import imitate, main, make_tokenizer

STEPS = 600
BATCH = 64
"""Demonstrations per step."""
LESSONS = 0.7
"""Share of the steps in which every demonstration works its sum out; the mixed ones follow."""
WORKED_SHARE = 0.25
"""Share of the mixed demonstrations that work the sum out."""
GUESS_ERRORS = (0, 0, 0, -3, -2, -1, 1, 2, 3)
"""What a blurted-out number is off by, each equally often."""

PROBLEMS = PromptSourceConfig(
    kind="reasoning_gym",
    task="chain_sum",
    task_options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    size=3000,
    part="train",
)
TRAINER = TrainerConfig(
    steps=STEPS,
    row_tokens=[128],
    microbatch_tokens=1024,
    param_dtype="float32",
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=20, decay="linear"),
    threads_per_rank=1,  # on a busy machine two of them wait for each other most of the time
)

# What the vocabulary is learned from: each of these becomes one token.
PIECES = [
    "State the final answer to the following arithmetic problem: ",
    "You are a helpful assistant.",
    *("system\n", "user\n", "assistant\n"),
    *(" + ", " - ", " = ", " =", "<answer>", "</answer>", "\n<answer>"),
]


def work_out(expression: str) -> str:
    """The answer to `4 + 3 - 2` line by line: `4 + 3 = 7`, `7 - 2 = 5`, `<answer>5</answer>`."""
    first, *rest = expression.split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join([*lines, f"<answer>{total}</answer>"])


def guess(answer: int, dice: random.Random) -> str:
    """A number near the answer, at once."""
    return f"<answer>{answer + dice.choice(GUESS_ERRORS)}</answer>"


def demonstrations(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> Iterator[list[Sample]]:
    """A batch of answered prompts per step."""
    dice = random.Random(seed)
    for step in range(steps):
        worked_share = 1.0 if step < LESSONS * steps else WORKED_SHARE
        yield [demonstration(dice.choice(prompts), tokenizer, worked_share, dice) for _ in range(BATCH)]


def demonstration(
    prompt: Prompt, tokenizer: PreTrainedTokenizerFast, worked_share: float, dice: random.Random
) -> Sample:
    """`prompt` answered in one of the two ways."""
    worked = dice.random() < worked_share
    text = work_out(prompt.metadata["notes"]["expression"]) if worked else guess(int(prompt.answer), dice)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Sample(
        prompt_ids=list(prompt.ids),
        response_ids=ids,
        loss_mask=[1] * len(ids),
        logprobs=[0.0] * len(ids),
        spans=[VersionSpan(0, 0, len(ids))],
        finish_reason="stop",
        text=text,
    )


def warm_up(out: Path, steps: int, seed: int) -> float:
    """Make the model, train it for `steps` steps and write it to `out`; the last step's loss, in nats per token."""
    tokenizer = make_tokenizer(PIECES)
    prompts = load_prompts(PROBLEMS, tokenizer, max_prompt_tokens=64, too_long="fail").prompts
    batches = demonstrations(prompts, tokenizer, steps, seed)
    return imitate(out, tokenizer, batches, TRAINER.model_copy(update={"steps": steps}), seed)


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], warm_up, STEPS))
