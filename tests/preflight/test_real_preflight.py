"""The whole command with libtpu as the compiler, for a tiny model: what it says of arguments is what was counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import Qwen3Config

SHORT = [
    "+experiment=qwen3_4b_dapo",
    "data.max_prompt_tokens=128",
    "rollout.max_response_tokens=384",
    "rollout.context_tokens=512",
    "algorithm.overlong_buffer_tokens=64",
    "evaluation=none",
    "trainer.row_tokens=[512]",
]

WIDE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Matrices that a TPU's tiles of 8 x 128 hold without padding, on four devices too."""


ALL_PROGRAMS = ["algorithm.kl.coefficient=0.1", "algorithm.old_logprobs=recompute"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], {"backward", "update"}),
        pytest.param(ALL_PROGRAMS, {"backward", "logprobs", "reference", "update"}, marks=pytest.mark.slow),
    ],
)
def test_a_tiny_model_compiles_fits_and_is_found_in_the_cache(tmp_path, more, expected):
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], **WIDE)
    config.save_pretrained(tmp_path / "model")

    def preflight(run: str) -> dict:
        options = [
            f"model.path={tmp_path / 'model'}",
            f"preflight.cache={tmp_path / 'cache'}",
            f"run_dir={tmp_path / run}",
        ]
        command = [sys.executable, "-m", "rl_tpu.preflight", *SHORT, *more, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / run / "preflight.json").read_text())

    first = preflight("first")
    programs = {program["name"]: program for program in first["programs"]}
    assert set(programs) == expected
    assert all(program["collectives"] for program in first["programs"] if program["name"] == "backward")
    sizes = first["memory"]["sizes"]
    state = 2 * sizes["gradients"] + sizes["moments"]  # as large as the weights are without their rotary tables
    assert programs["update"]["argument_bytes"] == pytest.approx(state, rel=0.05)
    again = preflight("again")
    assert all(program["cached"] for program in again["programs"])
    assert again["memory"] == first["memory"]
