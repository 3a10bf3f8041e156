"""The judge on SGLang's own server, which speaks the protocol it needs."""

import asyncio
import sys
from pathlib import Path

import pytest
import ray

from rl_tpu.rewards import Response
from rl_tpu.rewards.judge import NoVerdict, score
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import Prompt

sys.path.append(str(Path(__file__).parents[1] / "rollout"))


@pytest.mark.slow
def test_judge_on_sglang(tmp_path):
    from tiny import make_config, make_model, make_tokenizer

    make_model(tmp_path / "model", seed=0, tied=False)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    prompt = Prompt("p", (1,), "4", ({"role": "user", "content": "What is 2 + 2?"},))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with asyncio.Runner() as runner:
        config = make_config(tmp_path / "model", rollout={"context_tokens": 2048})
        engine = runner.run(SGLangEngine.start(config, tmp_path / "model", tmp_path, 0, {"num_cpus": 0}))
        try:
            options = {"url": f"{engine.url}/v1", "model": "default", "max_tokens": 16}
            responses = [Response("4", 1), Response("5", 1)]
            random = score(responses, "4", prompt, **options)
            held = score(responses, "4", prompt, **options, request={"regex": r"Verdict: [01]"})
        finally:
            runner.run(engine.close())
            ray.shutdown()
    assert all(isinstance(verdict, NoVerdict) for verdict in random), random  # its weights are random
    assert all(verdict in (0.0, 1.0) for verdict in held), held
