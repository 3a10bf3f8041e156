"""Many updates on one engine, and an engine of two tensor-parallel ranks."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest
import ray
import torch
from processes import session_members
from tiny import changed, load_model, make_config, reference_logprobs, weights_of

from rl_tpu.errors import RunError
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import SamplingParams
from weight_sync import Shard, open_sender

PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]


@pytest.fixture
def sender(run_id):
    sender = open_sender("shared_memory", run_id=run_id)
    yield sender
    sender.close()


def shards(tensors):
    return [Shard.whole(*item) for item in tensors.items()]


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_memory_stays_flat_over_many_updates(engine, model_dirs, sender, run, run_id):
    """With requests in flight all the while, none of which is aborted."""
    model = load_model(model_dirs["untied"])
    session = ray.get(engine._actor.__ray_call__.remote(lambda actor: actor._server._process.pid), timeout=30)
    sizes, shared = [], []

    async def updates():
        for version in range(1, 121):
            requests = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(40, seed=i), 4)) for i in range(4)]
            await asyncio.sleep(0.02)
            await engine.update_weights(sender.publish(version, shards(changed(weights_of(model), version))), version)
            for completion in (c for answer in await asyncio.gather(*requests) for c in answer):
                assert completion.finish_reason in ("stop", "length")
                assert {span.version for span in completion.spans} <= {version - 1, version}
            sizes.append(sum(resident_bytes(process) for process in session_members(session)))
            shared.append(len([name for name in os.listdir("/dev/shm") if run_id in name]))

    run(updates())
    assert max(sizes[-20:]) - max(sizes[20:40]) < 20e6
    assert max(shared[-20:]) <= max(shared[:20])


@pytest.mark.slow
def test_two_tensor_parallel_ranks(model_dirs, local_ray, run, sender, tmp_path):
    """Every rank verifies and takes its part; what one rank refuses no rank loads."""
    model_dir = model_dirs["untied"]
    config = make_config(model_dir, rollout={"tensor_parallel": 2})
    engine = run(SGLangEngine.start(config, model_dir, tmp_path, 0, {"num_cpus": 0}))
    try:
        model = load_model(model_dir)
        new = changed(weights_of(model), seed=1)
        update = run(engine.update_weights(sender.publish(1, shards(new)), 1))
        assert update.tensors == len(new)
        model.load_state_dict(new)

        def check():
            for completion in run(engine.generate(PROMPT, SamplingParams(16, seed=3), 3)):
                expected = reference_logprobs(model, PROMPT, completion.response_ids)
                assert torch.allclose(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
                assert {span.version for span in completion.spans} == {1}

        check()
        wrong = {**new, "model.norm.weight": torch.ones(63)}
        with pytest.raises(RunError, match=r"rank 0: model.norm.weight of shape \[63\].*nothing was loaded"):
            run(engine.update_weights(sender.publish(2, shards(wrong)), 2))
        check()
    finally:
        run(engine.close())
