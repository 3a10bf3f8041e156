"""What the examples' tiny policies share: a tokenizer, a Qwen3 of a million parameters, and a supervised warm-up.

A script that makes such a policy names its vocabulary and its demonstrations. The result is a Hugging Face directory: the
same bytes for the same arguments on one machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import Sample

LOCK_TIMEOUT_S = 1800

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(pieces: list[str], chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with about 350 tokens: any text can be written, and each of the ``pieces`` is one token.

    Every digit and every sign is a token of its own. `<|im_end|>` ends a turn.
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
        pieces,
        trainers.BpeTrainer(
            vocab_size=512,  # an upper bound: it ends when every piece is one token
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
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


def imitate(
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterable[list[Sample]],
    config: TrainerConfig,
    seed: int,
) -> float:
    """Make the model, train it with ``config`` on a batch per step and write it; the last step's loss, in nats per token."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.untrained-") as untrained:
        write_untrained(Path(untrained), tokenizer, seed)
        trainer = PolicyTrainer(config, AlgorithmConfig(), Path(untrained), seed=seed, loss="supervised")
        try:
            for samples in track(batches, total=config.steps, description="Warm-up"):
                metrics = trainer.update(pack(samples, config.row_tokens, 1, config.microbatch_tokens))
            trainer.export_hf(out)
        finally:
            trainer.close()
    return metrics["train/loss"]


def main(description: str, warm_up: Callable[[Path, int, int], float], default_steps: int) -> int:
    """The command line of such a script. ``warm_up(out, steps, seed)`` writes the policy and returns its loss."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; left alone if it exists")
    parser.add_argument("--steps", type=int, default=default_steps, help=f"optimizer steps (default {default_steps})")
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
