"""One real engine with a tiny policy, for the tests of a file that need one."""

from __future__ import annotations

import asyncio
import json

import pytest
import ray
import talker
import torch
from transformers import Qwen3ForCausalLM

from rl_tpu.config.schema import RunConfig
from rl_tpu.rollout.sglang import SGLangEngine


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory, byte_tokenizer):
    """A tiny Qwen3 that was taught one conversation (`talker`); to anything else it answers as it likes."""
    path = tmp_path_factory.mktemp("policy")
    talker.teach(path, byte_tokenizer)
    return path


@pytest.fixture(scope="module")
def run():
    """Runs a coroutine; all on one event loop, to which the engine's connections belong."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def policy_engine(policy_dir, run, tmp_path_factory):
    """SGLang, float32, with room for 1,024 tokens a request."""
    values = {
        "name": "environments",
        "model": {"path": str(policy_dir)},
        "data": {"train": {"kind": "reasoning_gym", "task": "chain_sum", "size": 1}},
        "reward": {"name": "reasoning_gym"},
        "rollout": {
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "max_response_tokens": 512,
            "context_tokens": 1024,
            "kv_cache_tokens": 16384,
            "max_running_requests": 64,
            "dtype": "float32",
        },
        "trainer": {"steps": 1, "row_tokens": [1024]},
        "cluster": {"device": "cpu", "chips_per_host": 2, "trainer_chips": 1, "rollout_chips": 1},
    }
    config = RunConfig.model_validate_json(json.dumps(values))
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    engine = run(SGLangEngine.start(config, policy_dir, tmp_path_factory.mktemp("run"), 0, {"num_cpus": 1}))
    yield engine
    run(engine.close())
    ray.shutdown()


@pytest.fixture(scope="module")
def policy_model(policy_dir):
    """The same policy in transformers: the second source of log-probabilities."""
    return Qwen3ForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
