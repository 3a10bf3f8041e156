"""Adding up: the state of the run and the compiler's figures, each byte once."""

from __future__ import annotations

import pytest
from compiled import GIB, compiled

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.preflight.memory import assess
from rl_tpu.orchestrator.preflight.model import ModelSizes

SIZES = ModelSizes(
    parameters=10 * GIB,
    weights=10 * GIB,
    gradients=10 * GIB,
    moments=20 * GIB,
    reference=5 * GIB,
    reference_on_host=False,
    checkpoint=0,
    engine_weights=8 * GIB,
    engine_policy=16 * GIB,
    kv_bytes_per_token=2**17,
)
CONFIG = load_config(["+experiment=qwen3_4b_dapo"])


def peaks(*programs, sizes=SIZES):
    return {
        each.program.split()[0]: each.peak and each.peak / GIB
        for each in assess(CONFIG, sizes, programs, 96 * GIB).trainer
    }


def test_arguments_of_programs_are_the_state_and_counted_once():
    backward = compiled("backward", 10 * GIB + 10 * GIB + 30 * GIB)  # weights, gradients, 30 GiB of activations
    logprobs = compiled("logprobs", 10 * GIB + 7 * GIB)
    update = compiled("update", 10 * GIB + 10 * GIB + 20 * GIB + 1 * GIB)
    reference = compiled("reference", 5 * GIB + 7 * GIB)
    found = peaks(backward, logprobs, update, reference)
    state = 10 + 20 + 5  # gradients come and go
    assert found == {
        "backward": state + 10 + 30,
        "logprobs": state + 7,
        "update": state + 10 + 1,
        "reference": state + 7,
    }


def test_parts_add_up_to_the_peak():
    memory = assess(CONFIG, SIZES, [compiled("backward", 50 * GIB)], 96 * GIB)
    assert sum(memory.worst.parts.values()) == memory.worst.peak
    assert memory.worst.parts["activations"] == 30 * GIB


def test_a_reference_in_host_memory_takes_none_of_the_device():
    from dataclasses import replace

    away = replace(SIZES, reference_on_host=True)
    assert peaks(compiled("backward", 50 * GIB), sizes=away) == {"backward": 70}


def test_the_limit_is_the_compilers_and_one_program_decides():
    fitting, large = compiled("update", 41 * GIB), compiled("backward", 80 * GIB)
    assert not assess(CONFIG, SIZES, [fitting, large], 96 * GIB).fits
    assert assess(CONFIG, SIZES, [fitting, large], 96 * GIB).worst.program == "backward 4x22528"
    assert assess(CONFIG, SIZES, [fitting, compiled("backward", 69 * GIB)], 96 * GIB).fits
    assert not assess(CONFIG, SIZES, [fitting, compiled("backward", 69 * GIB + 1)], 96 * GIB).fits


def test_what_did_not_compile_does_not_fit():
    memory = assess(CONFIG, SIZES, [compiled("update", GIB), compiled("backward", None)], 96 * GIB)
    assert not memory.fits
    assert memory.worst.error == "CompileTimeHbmOom: 107.64G exceeds 94.74G"


def test_nothing_compiled_is_nothing_known():
    assert not assess(CONFIG, SIZES, [], 96 * GIB).fits


@pytest.mark.parametrize(
    ("overrides", "tokens", "fits"),
    [
        ([], (0.8 * 96 - 8) * 8192, True),  # 2^17 bytes a token: 8,192 tokens in a GiB
        (["++rollout.server_options.mem_fraction_static=0.5"], (0.5 * 96 - 8) * 8192, True),
        (["rollout.kv_cache_tokens=30000"], 30000, True),
        (["++rollout.server_options.mem_fraction_static=0.11"], (0.11 * 96 - 8) * 8192, False),  # 20,971 < 22,528
    ],
)
def test_tokens_of_the_key_value_cache(overrides, tokens, fits):
    config = load_config(["+experiment=qwen3_4b_dapo", *overrides])
    rollout = assess(config, SIZES, [], 96 * GIB).rollout
    assert rollout.kv_tokens == pytest.approx(tokens, abs=1)
    assert rollout.fits == fits
    assert rollout.requests == rollout.kv_tokens // 11264
    assert rollout.wanted_tokens == 256 * 22528 / 2


def test_a_model_larger_than_the_device_has_no_cache():
    rollout = assess(CONFIG, SIZES, [], 4 * GIB).rollout
    assert rollout.kv_tokens == 0
    assert not rollout.fits
