"""How long training stands still for a checkpoint: `python benchmarks/training/checkpoint_pause.py [--layers N]`.

One rank in this process, a random Qwen3 model; the time that `save` takes in each mode, and until the files are whole.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_tpu.config.schema import AlgorithmConfig, CheckpointConfig, TrainerConfig
from rl_tpu.trainer.step import PolicyTrainer

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=8_000,
                hidden_size=options.hidden,
                intermediate_size=3 * options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=options.hidden // 64,
                num_key_value_heads=options.hidden // 128,
                head_dim=64,
            )
        )
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        model.save_pretrained(model_dir)
        del model
        print(f"{millions:.0f} million parameters; medians of {REPEATS} saves")
        stands = {mode: pause(model_dir, Path(folder), mode) for mode in ("sync", "async")}
        print(f"async stands still for {stands['async'] / stands['sync']:.2f} of the time")


def pause(model_dir: Path, folder: Path, mode: str) -> float:
    """Median of the seconds that `save` takes."""
    config = TrainerConfig(steps=1, param_dtype="float32", checkpoint=CheckpointConfig(mode=mode))
    trainer = PolicyTrainer(config, AlgorithmConfig(), model_dir)
    stood, whole = [], []
    for repeat in range(REPEATS + 1):
        started = time.perf_counter()
        trainer.save(folder / f"{mode}-{repeat}")
        stood.append(time.perf_counter() - started)
        trainer.saved()
        whole.append(time.perf_counter() - started)
        shutil.rmtree(folder / f"{mode}-{repeat}")
    trainer.close()
    print(f"{mode:>5}: training stands still {median(stood[1:]):.2f} s, whole after {median(whole[1:]):.2f} s")
    return median(stood[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
