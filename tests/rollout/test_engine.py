"""One real engine: what it samples, what it reports, and how it takes a new policy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import aiohttp
import numpy as np
import pytest
import ray
import torch
from processes import cpu_seconds, session_members
from tiny import (
    END,
    changed,
    load_model,
    reference_logits,
    reference_logprobs,
    weights_of,
)

from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.engine import UpdateRefusedError
from rl_tpu.rollout.responses import STREAM_TOKENS
from rl_tpu.types import SamplingParams
from weight_sync import Shard, open_sender
from weight_sync.shared_memory.segments import PAGE_BYTES

PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]


@pytest.fixture(scope="module")
def policy(model_dirs):
    """transformers' twin of what the engine holds; tests that load other weights load them into it as well."""
    return load_model(model_dirs["untied"])


@pytest.fixture
def update(engine, policy, publish, run):
    """Brings weights to the engine and to its twin."""

    def update(version: int, tensors: dict[str, torch.Tensor]):
        report = run(engine.update_weights(publish(version, tensors), version))
        policy.load_state_dict(tensors)
        return report

    return update


def greedy(tokens: int = 12, **options) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0, **options)


def close(found: list[float], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found), expected, rtol=0, atol=1e-4)


def test_answers_that_come_whole_are_those_that_are_streamed(engine, run):
    """Samples of up to STREAM_TOKENS come once the last has ended: ids, log-probabilities and spans are the same."""
    whole, streamed = (
        run(engine.generate(PROMPT, SamplingParams(tokens, seed=3), 4)) for tokens in (STREAM_TOKENS, STREAM_TOKENS + 1)
    )
    assert max(len(each.response_ids) for each in streamed) == STREAM_TOKENS + 1
    for one, other in zip(whole, streamed, strict=True):
        assert one.response_ids == other.response_ids[:STREAM_TOKENS]
        assert close(one.logprobs, torch.tensor(other.logprobs[:STREAM_TOKENS]))
        assert [(span.version, span.start) for span in one.spans] == [(span.version, 0) for span in other.spans]
        assert one.spans[-1].end == len(one.response_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_sampled_distribution(engine, policy, run, temperature):
    completions = run(engine.generate(PROMPT, SamplingParams(24, temperature=temperature, seed=3), 4))
    assert len(completions) == 4
    for completion in completions:
        expected = reference_logprobs(policy, PROMPT, completion.response_ids, temperature or 1.0)
        assert close(completion.logprobs, expected)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, -1), (1.0, 5), (0.6, 20)])
def test_logprobs_of_a_truncated_distribution(engine, policy, run, top_p, top_k):
    temperature = 0.8
    params = SamplingParams(16, temperature=temperature, top_p=top_p, top_k=top_k, seed=11)
    for completion in run(engine.generate(PROMPT, params, 4)):
        logits = reference_logits(policy, PROMPT, completion.response_ids)
        probabilities, order = torch.softmax(logits / temperature, -1).sort(descending=True)
        before = probabilities.cumsum(-1) - probabilities
        kept = before <= top_p
        if top_k > 0:
            kept[:, top_k:] = False
        truncated = torch.where(kept, probabilities, 0)
        truncated /= truncated.sum(-1, keepdim=True)
        sampled = order == torch.tensor(completion.response_ids)[:, None]
        assert close(completion.logprobs, truncated[sampled].log())


def test_samples_follow_the_policy(engine, policy, run):
    """Shares of 3,000 first tokens against transformers' probabilities: total variation as small as chance leaves it."""
    requests = [engine.generate(PROMPT, SamplingParams(1, seed=1000 * i), 100) for i in range(30)]

    async def all_of_them():
        return await asyncio.gather(*requests)

    drawn = Counter(c.response_ids[0] for completions in run(all_of_them()) for c in completions)
    probabilities = torch.softmax(reference_logits(policy, PROMPT, [0])[0], -1)
    count = drawn.total()
    distance = sum(abs(drawn[token] / count - p) for token, p in enumerate(probabilities.tolist())) / 2
    # Expected total variation of n fair draws is at most sum(sqrt(p (1 - p) / n)) / 2.
    by_chance = ((probabilities * (1 - probabilities) / count).sqrt().sum() / 2).item()
    assert distance < 1.2 * by_chance
    uniform = (probabilities - 1 / len(probabilities)).abs().sum().item() / 2
    assert uniform > 3 * by_chance  # so that the bound above can fail


def test_seeds(engine, run):
    params = SamplingParams(16, seed=7)
    first, again = (run(engine.generate(PROMPT, params, 4)) for _ in range(2))
    assert [c.response_ids for c in first] == [c.response_ids for c in again]
    assert len({tuple(c.response_ids) for c in first}) == 4
    other = run(engine.generate(PROMPT, SamplingParams(16, seed=8), 1))
    assert other[0].response_ids == first[1].response_ids  # sample i has seed + i


def test_finish_reasons(engine, run):
    (whole,) = run(engine.generate(PROMPT, greedy(), 1))
    assert whole.finish_reason == "length"
    assert len(whole.response_ids) == len(whole.logprobs) == 12

    stop = whole.response_ids[4]
    end = whole.response_ids.index(stop) + 1
    (stopped,) = run(engine.generate(PROMPT, greedy(stop_token_ids=(stop,)), 1))
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids == whole.response_ids[:end]
    assert stopped.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-5)

    ended = 0
    for completion in run(engine.generate(PROMPT, SamplingParams(100, seed=0), 64)):
        assert len(completion.logprobs) == len(completion.response_ids)
        assert END not in completion.response_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.response_ids[-1] == END)
        assert completion.finish_reason == "stop" or len(completion.response_ids) == 100
        ended += completion.finish_reason == "stop"
    assert 0 < ended < 64


def test_an_aborted_request_returns_what_it_has(engine, policy, run):
    async def abort():
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(900, temperature=0.9, seed=1), 2))
        await asyncio.sleep(0.5)
        async with aiohttp.ClientSession() as session:
            await session.post(f"{engine.url}/abort_request", json={"abort_all": True})
        return await task

    completions = [c for c in run(abort()) if c.finish_reason != "stop"]
    assert completions
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.response_ids) < 900
        assert close(completion.logprobs, reference_logprobs(policy, PROMPT, completion.response_ids, 0.9))


def test_an_idle_engine_leaves_the_cores_to_the_trainer(engine, run):
    session = ray.get(engine._actor.__ray_call__.remote(lambda actor: actor._server._process.pid), timeout=30)
    processes = session_members(session)
    assert len(processes) == 5  # first, supervisor, HTTP, scheduler, detokenizer
    time.sleep(1)
    before = sum(map(cpu_seconds, processes))
    time.sleep(2)
    assert sum(map(cpu_seconds, processes)) - before < 0.5


def test_requests_it_cannot_serve(engine, run):
    with pytest.raises(UserError, match="outside of the model's vocabulary of 301"):
        run(engine.generate([5, 301], greedy(), 1))
    with pytest.raises(UserError, match="no token"):
        run(engine.generate([], greedy(), 1))
    with pytest.raises(UserError, match="no min_p in seeded sampling"):
        run(engine.generate(PROMPT, SamplingParams(4, min_p=0.1), 1))
    with pytest.raises(RunError, match=r"engine 0 refused /generate: .*1024"):
        run(engine.generate(PROMPT, greedy(2000), 1))
    assert run(engine.healthy())


def test_update(engine, policy, update, run):
    before = run(engine.generate(PROMPT, greedy(), 1))[0]
    new = changed(weights_of(policy), seed=1)
    report = update(1, new)
    assert report.version == 1
    assert report.tensors == len(new)
    assert report.bytes == sum(tensor.nbytes for tensor in new.values())
    assert report.stage_seconds > 0 < report.pause_seconds
    assert differing(expected_checksums(new), run(engine.weight_checksums())) == []

    after = run(engine.generate(PROMPT, greedy(), 1))[0]
    assert after.response_ids != before.response_ids
    assert close(after.logprobs, reference_logprobs(policy, PROMPT, after.response_ids))
    assert [(span.version, span.start, span.end) for span in after.spans] == [(1, 0, 12)]


def test_the_prefix_cache_ends_with_its_policy(engine, policy, update, run):
    prompt = [3 + i % 290 for i in range(80)]
    assert run(engine.generate(prompt, greedy(4), 1))[0].cached_prompt_tokens == 0
    assert run(engine.generate(prompt, greedy(4), 1))[0].cached_prompt_tokens > 70
    update(2, changed(weights_of(policy), seed=2))
    completion = run(engine.generate(prompt, greedy(4), 1))[0]
    assert completion.cached_prompt_tokens == 0
    assert close(completion.logprobs, reference_logprobs(policy, prompt, completion.response_ids))


def test_the_samples_of_a_prompt_share_it(engine, policy, run):
    prompt = [3 + (7 * i) % 290 for i in range(300)]
    for completion in run(engine.generate(prompt, SamplingParams(4, seed=5), 3)):
        assert completion.cached_prompt_tokens == 299
        assert close(completion.logprobs, reference_logprobs(policy, prompt, completion.response_ids))


def test_an_update_in_mid_decode(engine, policy, model_dirs, update, run, publish):
    """No request is aborted; every token's log-probability is that of the policy its span names."""
    old = load_model(model_dirs["untied"])
    update(3, weights_of(old))
    new_weights = changed(weights_of(old), seed=3)
    handle = publish(4, new_weights)

    async def generate_and_update():
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(300, stop_token_ids=(), seed=2), 6))
        await asyncio.sleep(0.7)
        await engine.update_weights(handle, 4)
        return await task

    completions = run(generate_and_update())
    policy.load_state_dict(new_weights)
    mixed = [c for c in completions if len(c.spans) == 2]
    assert mixed
    for completion in completions:
        assert completion.finish_reason in ("stop", "length")
        assert completion.spans[0].start == 0
        assert completion.spans[-1].end == len(completion.response_ids)
        for span in completion.spans:
            model = {3: old, 4: policy}[span.version]
            expected = reference_logprobs(model, PROMPT, completion.response_ids)
            assert close(completion.logprobs[span.start : span.end], expected[span.start : span.end])
    assert all([span.version for span in c.spans] == [3, 4] for c in mixed)


def test_damaged_bytes_are_refused(engine, policy, update, publish, run):
    weights = weights_of(policy)
    update(5, weights)
    answer = run(engine.generate(PROMPT, greedy(), 1))[0]
    handle = publish(6, changed(weights, seed=6))
    segment = np.memmap(handle["path"], dtype=np.uint8, mode="r+")
    segment[PAGE_BYTES + 1000] ^= 1  # the tensors follow a page of the segment's own
    first = next(iter(weights))
    with pytest.raises(RunError, match=rf"engine 0 refused .*xxh3-128 of 1 tensor.*{first}.*nothing was loaded"):
        run(engine.update_weights(handle, 6))
    assert differing(expected_checksums(weights), run(engine.weight_checksums())) == []
    again = run(engine.generate(PROMPT, greedy(), 1))[0]
    assert again.response_ids == answer.response_ids
    assert again.spans[0].version == 5


def test_a_refused_update_in_mid_decode(engine, policy, update, publish, run):
    """Requests in flight go on as if nothing had been."""
    update(6, weights_of(policy))
    handle = publish(7, {**weights_of(policy), "model.nope.weight": torch.ones(3)})

    async def generate_and_fail():
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(900, seed=2), 6))
        await asyncio.sleep(0.5)
        with pytest.raises(UpdateRefusedError, match=r"no place for model.nope.weight.*nothing was loaded"):
            await engine.update_weights(handle, 7)
        return await task

    for completion in run(generate_and_fail()):
        assert completion.finish_reason in ("stop", "length")
        assert [span.version for span in completion.spans] == [6]


def test_a_handle_that_is_too_old_is_refused(engine, policy, publish, run):
    handles = [publish(version, weights_of(policy)) for version in (7, 8, 9)]
    with pytest.raises(RunError, match=r"version 7 is no longer in .*nothing was loaded"):
        run(engine.update_weights(handles[0], 7))
    assert run(engine.update_weights(handles[2], 9)).version == 9


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model.layers.0.nope.weight": torch.ones(4)}, "no place for model.layers.0.nope.weight"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(4, 4)}, "model.layers.7.mlp"),
        ({"model.layers.1.self_attn.k_proj.weight": None}, "model.layers.1.self_attn.qkv_proj.weight"),
        ({"model.layers.0.mlp.up_proj.weight": None}, "model.layers.0.mlp.gate_up_proj.weight"),
        ({"model.norm.weight": None}, "leave out .*model.norm.weight"),
        ({"lm_head.weight": None}, "leave out .*lm_head.weight"),
        ({"model.norm.weight": torch.ones(63)}, r"model.norm.weight of shape \[63\] does not fit"),
        ({"model.embed_tokens.weight": torch.ones(320, 64)}, r"model.embed_tokens.weight of shape \[320, 64\]"),
        ({"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 32)}, "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(engine, policy, publish, run, edit, message):
    weights = weights_of(policy)
    tensors = {name: value for name, value in (weights | edit).items() if value is not None}
    with pytest.raises(RunError, match=f"{message}.*nothing was loaded"):
        run(engine.update_weights(publish(10, tensors), 10))
    assert differing(expected_checksums(weights), run(engine.weight_checksums())) == []


def test_an_update_without_verification(engine, policy, run, run_id, model_dirs):
    unverified = engine._config.model_copy(
        update={"weight_sync": engine._config.weight_sync.model_copy(update={"verify": False})}
    )
    sender = open_sender("shared_memory", run_id=run_id, hashes=False)
    new = changed(weights_of(policy), seed=11)
    verified, engine._config = engine._config, unverified
    try:
        assert run(engine.update_weights(sender.publish(11, [Shard.whole(*i) for i in new.items()]), 11)).version == 11
    finally:
        engine._config = verified
        sender.close()
    policy.load_state_dict(new)
    assert differing(expected_checksums(new), run(engine.weight_checksums())) == []
