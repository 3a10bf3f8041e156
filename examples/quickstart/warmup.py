"""Makes the quickstart's starting policy: a tiny Qwen3 with its own tokenizer, warmed up on demonstrations.

    python examples/quickstart/warmup.py --out DIRECTORY

First the policy sees sums of one-digit numbers worked out line by line. Then it sees how most people answer: three of
four blurt out a number, which is seldom right. It imitates both in the same proportion, and nothing in the demonstrations
says which way is better: that is left to reinforcement learning. Problems of the held-out part are never shown.

The result is a Hugging Face directory: the same bytes for the same arguments on one machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig, PromptSourceConfig, TrainerConfig
from rl_tpu.data import load_prompts
from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import Prompt, Sample, VersionSpan

STEPS = 600
BATCH = 64
"""Demonstrations per step."""
LESSONS = 0.7
"""Share of the steps in which every demonstration works its sum out; the mixed ones follow."""
WORKED_SHARE = 0.25
"""Share of the mixed demonstrations that work the sum out."""
GUESS_ERRORS = (0, 0, 0, -3, -2, -1, 1, 2, 3)
"""What a blurted-out number is off by, each equally often."""
LOCK_TIMEOUT_S = 1800

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

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# What the vocabulary is learned from: each of these becomes one token.
PIECES = [
    "State the final answer to the following arithmetic problem: ",
    "You are a helpful assistant.",
    *("system\n", "user\n", "assistant\n"),
    *(" + ", " - ", " = ", " =", "<answer>", "</answer>", "\n<answer>"),
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with about 350 tokens: any text can be written, the quickstart's prompts and answers in few tokens.

    Every digit and every sign is a token of its own. Turns are in ChatML; `<|im_end|>` ends a turn.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|-(?=\d)"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        PIECES,
        trainers.BpeTrainer(
            vocab_size=512,  # an upper bound: it ends when every piece is one token
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def write_untrained(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """A Qwen3 of a million parameters with random weights, as a Hugging Face directory."""
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        # Narrow layers need larger weights than the usual 0.02: with those the warm-up takes several times as long.
        initializer_range=0.06,
    )
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (config.hidden_size,),
            f"{at}.self_attn.q_proj.weight": (queries, config.hidden_size),
            f"{at}.self_attn.k_proj.weight": (keys, config.hidden_size),
            f"{at}.self_attn.v_proj.weight": (keys, config.hidden_size),
            f"{at}.self_attn.o_proj.weight": (config.hidden_size, queries),
            f"{at}.self_attn.q_norm.weight": (config.head_dim,),
            f"{at}.self_attn.k_norm.weight": (config.head_dim,),
            f"{at}.post_attention_layernorm.weight": (config.hidden_size,),
            f"{at}.mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
            f"{at}.mlp.up_proj.weight": (config.intermediate_size, config.hidden_size),
            f"{at}.mlp.down_proj.weight": (config.hidden_size, config.intermediate_size),
        }
    shapes["model.norm.weight"] = (config.hidden_size,)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * config.initializer_range
        for name, shape in shapes.items()
    }
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


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
    tokenizer = make_tokenizer()
    prompts = load_prompts(PROBLEMS, tokenizer, max_prompt_tokens=64, too_long="fail").prompts
    batches = demonstrations(prompts, tokenizer, steps, seed)
    config = TRAINER.model_copy(update={"steps": steps})
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.untrained-") as untrained:
        write_untrained(Path(untrained), tokenizer, seed)
        trainer = PolicyTrainer(config, AlgorithmConfig(), Path(untrained), seed=seed, loss="supervised")
        try:
            for samples in track(batches, total=steps, description="Warm-up"):
                metrics = trainer.update(pack(samples, config.row_tokens, 1, config.microbatch_tokens))
            trainer.export_hf(out)
        finally:
            trainer.close()
    return metrics["train/loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write; left alone if it exists")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations (default 0)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, it is {arguments.steps}")
    out: Path = arguments.out.resolve()
    started = time.perf_counter()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Whoever comes second waits, and finds the directory made.
        with FileLock(out.with_name(f".{out.name}.lock"), timeout=LOCK_TIMEOUT_S):
            if out.exists():
                print(f"{out} exists already")
                return 0
            loss = warm_up(out, arguments.steps, arguments.seed)
    except Timeout:
        print(f"another process has been making {out} for {LOCK_TIMEOUT_S} s; choose another --out", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--out {out} cannot be written: {error}", file=sys.stderr)
        return 2
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(f"{out}: {arguments.steps} steps, loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
