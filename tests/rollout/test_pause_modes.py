"""Updates in the middle of 2,000-token samples, in every pause mode: what becomes of them, and of the prefix cache."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from tiny import changed, load_model, make_config, reference_logprobs, weights_of

from rl_tpu.rollout.fleet import Fleet
from rl_tpu.types import SamplingParams

TOKENS = 2000
PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]
LONG_PROMPT = [3 + i % 290 for i in range(80)]
MODES = ["in_place", "retract", "abort", "resume"]


@pytest.fixture(scope="module")
def model_dir(model_dirs, tmp_path_factory):
    """The untied model without an end token: every sample has its full length."""
    path = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model_dirs["untied"], path)
    for name, keys in (("config.json", ["eos_token_id"]), ("tokenizer_config.json", ["eos_token"])):
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**fields, **dict.fromkeys(keys)}))
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def fleet(model_dir, local_ray, run, tmp_path_factory):
    """One engine; of more than four samples some wait."""
    config = make_config(
        model_dir, rollout={"context_tokens": 2048, "max_running_requests": 4, "request_timeout_s": 300}
    )
    fleet = run(Fleet.start(config, model_dir, tmp_path_factory.mktemp("run"), [{"num_cpus": 0}]))
    yield fleet
    run(fleet.close())


@pytest.fixture(params=MODES)
def mode(request, fleet, monkeypatch):
    sync = fleet._config.weight_sync.model_copy(update={"pause_mode": request.param})
    config = fleet._config.model_copy(update={"weight_sync": sync})
    monkeypatch.setattr(fleet, "_config", config)
    monkeypatch.setattr(fleet.engines[0], "_config", config)
    return request.param


def holding(model_dir, weights):
    model = load_model(model_dir)
    model.load_state_dict(weights)
    return model


def close(found, expected) -> bool:
    return torch.allclose(torch.tensor(found), expected, rtol=0, atol=2e-4)


@torch.no_grad()
def logprobs_over_old_entries(old, new, prompt, response, start) -> torch.Tensor:
    """Of the response's tokens from ``start`` on, under ``new`` with the keys and values that ``old`` computed before."""
    ids = torch.tensor([prompt + response])
    first = len(prompt) + start - 1  # the position from which token ``start`` is drawn
    entries = old(ids[:, :first], use_cache=True).past_key_values
    logits = new(ids[:, first:-1], past_key_values=entries).logits[0]
    return torch.log_softmax(logits, -1).gather(1, ids[0, first + 1 :, None]).squeeze(1)


async def update_in_the_middle(fleet, handle, version):
    """Eight samples of two requests, half of them waiting, and more requests that come until the update is over."""
    prompts = [[*PROMPT, i] for i in range(2)]
    requests = [asyncio.create_task(fleet.generate(prompt, SamplingParams(TOKENS), 4)) for prompt in prompts]
    await asyncio.sleep(3)
    update = asyncio.create_task(fleet.update_weights(handle, version))
    while not update.done():
        if len(prompts) < 30:  # more would keep a busy machine from ever getting to the update
            prompts.append(LONG_PROMPT)
            requests.append(asyncio.create_task(fleet.generate(LONG_PROMPT, SamplingParams(20), 1)))
        await asyncio.sleep(0.05)
    answers = await asyncio.gather(*requests)
    return await update, [(prompt, c) for prompt, answer in zip(prompts, answers, strict=True) for c in answer]


def test_an_update_in_the_middle(fleet, run, mode, model_dir, publish):
    """No sample is lost; every log-probability is that of the policy its span names."""
    base = weights_of(load_model(model_dir))
    first, second = changed(base, seed=1), changed(base, seed=2)
    old, new = holding(model_dir, first), holding(model_dir, second)
    version = 10 * MODES.index(mode) + 1
    run(fleet.update_weights(publish(version, first), version))
    metrics, answers = run(update_in_the_middle(fleet, publish(version + 1, second), version + 1))

    assert (metrics["sync/aborted_requests"] > 0) == (mode in ("abort", "resume"))
    assert [len(completion.response_ids) for _, completion in answers[:8]] == [TOKENS] * 8
    crossed = 0
    for prompt, completion in answers:
        response, spans = completion.response_ids, completion.spans
        assert completion.finish_reason == "length"
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(response) == len(completion.logprobs)
        if len(spans) == 1:
            model = {version: old, version + 1: new}[spans[0].version]
            expected = reference_logprobs(model, prompt, response)
        else:
            crossed += 1
            assert [span.version for span in spans] == [version, version + 1]
            start = spans[1].start
            if mode == "in_place":
                after = logprobs_over_old_entries(old, new, prompt, response, start)
            else:
                after = reference_logprobs(new, prompt, response)[start:]
            expected = torch.cat([reference_logprobs(old, prompt, response)[:start], after])
        assert close(completion.logprobs, expected)
    assert crossed == (0 if mode == "abort" else 4)  # the other half had not begun


def test_a_prefix_of_an_old_policy_is_never_found(fleet, run, mode, model_dir, publish):
    """Not even while a sample in flight holds on to it, nor when it is left behind at its end."""
    base = weights_of(load_model(model_dir))
    first, second = changed(base, seed=3), changed(base, seed=4)
    new = holding(model_dir, second)
    version = 10 * MODES.index(mode) + 5
    run(fleet.update_weights(publish(version, first), version))
    handle = publish(version + 1, second)

    async def ask():
        return (await fleet.generate(LONG_PROMPT, SamplingParams(8), 1))[0]

    async def update_while_it_is_held():
        held = asyncio.create_task(fleet.generate(LONG_PROMPT, SamplingParams(300), 1))
        await asyncio.sleep(0.5)
        found = await ask()
        await fleet.update_weights(handle, version + 1)
        during = await ask()
        await held
        return found, during, await ask()

    found, during, after = run(update_while_it_is_held())
    assert found.cached_prompt_tokens > 70
    for completion in (during, after):
        assert [span.version for span in completion.spans] == [version + 1]
        assert close(completion.logprobs, reference_logprobs(new, LONG_PROMPT, completion.response_ids))
    if mode == "in_place":
        assert during.cached_prompt_tokens == 0
    assert after.cached_prompt_tokens > 70  # what the new policy computed itself is found
