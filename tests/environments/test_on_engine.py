"""An environment of two turns on a real SGLang engine; transformers is the second source for its log-probabilities."""

import asyncio
import json

import pytest
import ray
import torch
from tiny_qwen3 import tiny_config
from transformers import Qwen3ForCausalLM

from rl_tpu.config.schema import EnvironmentConfig, RunConfig
from rl_tpu.environments import make_environment
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import Prompt, SamplingParams


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, byte_tokenizer):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    more = {"eos_token_id": byte_tokenizer.eos_token_id, "max_position_embeddings": 512, "initializer_range": 0.1}
    config = tiny_config(len(byte_tokenizer), False, **more)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():  # a random policy that likes to end its turn
        model.lm_head.weight[byte_tokenizer.eos_token_id] *= 2
    model.save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run_config(model_dir):
    values = {
        "name": "environment-test",
        "model": {"path": str(model_dir)},
        "data": {"train": {"kind": "reasoning_gym", "task": "chain_sum", "size": 1}},
        "reward": {"name": "reasoning_gym"},
        "rollout": {
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "max_response_tokens": 160,
            "context_tokens": 512,
            "kv_cache_tokens": 8192,
            "max_running_requests": 16,
            "dtype": "float32",
        },
        "trainer": {"steps": 1},
        "cluster": {"device": "cpu", "chips_per_host": 2, "trainer_chips": 1, "rollout_chips": 1},
    }
    return RunConfig.model_validate_json(json.dumps(values))


@pytest.fixture(scope="module")
def ray_of_our_own():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_two_turns(ray_of_our_own, run_config, model_dir, byte_tokenizer, tmp_path):
    messages = ({"role": "user", "content": "2 + 3 ="},)
    ids = byte_tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    prompt = Prompt("p", tuple(ids), "5", messages)
    params = SamplingParams(max_response_tokens=160, temperature=1.0, seed=11)
    name = "examples.custom_environment.retry_once:RetryOnce"
    environment = make_environment(EnvironmentConfig(name=name, options={"feedback": "No."}), byte_tokenizer)

    async def sample():
        engine = await SGLangEngine.start(run_config, model_dir, tmp_path, 0, {"num_cpus": 1})
        try:
            return await environment.run(prompt, 12, params, engine.generate)
        finally:
            await engine.close()

    samples = asyncio.run(sample())
    assert len(samples) == 12
    retried = [sample for sample in samples if 0 in sample.loss_mask]
    assert len(retried) >= 3

    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for sample in samples:
        assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.logprobs) <= 160
        whole = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits = model(whole).logits[0, len(sample.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        written = torch.tensor(sample.loss_mask, dtype=torch.bool)
        torch.testing.assert_close(torch.tensor(sample.logprobs)[written], expected[written], atol=1e-4, rtol=1e-3)
        assert not torch.tensor(sample.logprobs)[~written].any()
        message = [i for i, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask == 0]
        if message:
            text = byte_tokenizer.decode(message)
            assert text == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
