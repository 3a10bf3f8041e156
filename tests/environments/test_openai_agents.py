"""Agents at work on a real engine, through HTTP, and what becomes of their samples."""

from __future__ import annotations

import asyncio
import sys
import time

import httpx
import psutil
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from rl_tpu.config.schema import EnvironmentConfig
from rl_tpu.environments import make_environment
from rl_tpu.errors import RunError, UserError
from rl_tpu.types import Prompt, SamplingParams

PARAMS = SamplingParams(max_response_tokens=160, temperature=1.0, seed=11)
MESSAGES = ({"role": "user", "content": "2 + 3 ="},)
ASK = {"model": "any", "messages": list(MESSAGES)}


@pytest.fixture(scope="module")
def prompt(byte_tokenizer):
    ids = byte_tokenizer.apply_chat_template(list(MESSAGES), add_generation_prompt=True, return_dict=False)
    return Prompt("p", tuple(ids), "5", MESSAGES, {"level": 1})


class Recorder:
    """The engine's `generate`, and everything that went through it."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = []

    async def __call__(self, ids, params, n):
        completions = await self.engine.generate(ids, params, n)
        self.calls += [(list(ids), completion) for completion in completions]
        return completions


@pytest.fixture
def play(byte_tokenizer, policy_engine, run, prompt):
    """Samples of the prompt that an agent of `openai_agents` worked on, and the engine's raw completions."""

    def play(agent=None, n=1, params=PARAMS, **options):
        if agent is not None:
            options["agent"] = agent if ":" in agent else f"openai_agents:{agent}"
        environment = make_environment(EnvironmentConfig(name="openai_agent", options=options), byte_tokenizer)
        recorder = Recorder(policy_engine)

        async def work():
            await environment.open()
            try:
                return await environment.run(prompt, n, params, recorder)
            finally:
                await environment.close()

        return run(work()), recorder.calls

    return play


def check_logprobs(sample, model):
    whole = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        logits = model(whole).logits[0, len(sample.prompt_ids) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
    written = torch.tensor(sample.loss_mask, dtype=torch.bool)
    torch.testing.assert_close(torch.tensor(sample.logprobs)[written], expected[written], atol=1e-4, rtol=1e-4)
    assert not torch.tensor(sample.logprobs)[~written].any()


@pytest.mark.parametrize("agent", ["two_turns", "streaming"])
def test_the_sample_is_what_the_engine_read_and_wrote(play, policy_model, byte_tokenizer, agent):
    """Random ids are no text that anything could encode again; still all of them stay what they were."""
    samples, calls = play(agent, n=8)
    assert len(samples) == 8
    assert len(calls) == 16
    for sample in samples:
        whole = sample.prompt_ids + sample.response_ids
        mine = [(ids, said) for ids, said in calls if whole[: len(ids)] == ids and _ends(whole, ids, said)]
        mine.sort(key=lambda call: len(call[0]))
        assert len(mine) == len(sample.turns) == 2
        assert mine[0][0] == sample.prompt_ids
        for turn, (ids, said) in zip(sample.turns, mine, strict=True):
            assert len(sample.prompt_ids) + turn.start == len(ids)
            assert sample.response_ids[turn.start : turn.end] == said.response_ids
            assert sample.logprobs[turn.start : turn.end] == said.logprobs
        assert sum(sample.loss_mask) == sum(turn.end - turn.start for turn in sample.turns)
        check_logprobs(sample, policy_model)
        first, second = sample.turns
        between = byte_tokenizer.decode(sample.response_ids[first.end : second.start])
        ended = "" if sample.response_ids[first.end - 1] == byte_tokenizer.eos_token_id else "<|im_end|>"
        assert between == ended + "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
        assert sample.measures["other_conversations"] == sample.measures["failed"] == 0
        assert sample.measures["answers"] == sample.measures["turns"] == 2
    rewards = [sample.turns[-1].reward for sample in samples]
    if agent == "two_turns":
        assert rewards == [0.5] * 8
        assert samples[0].measures["messages"] == 5
    else:  # the client read the last answer's log-probabilities
        assert rewards == pytest.approx([sum(s.logprobs[s.turns[1].start :]) for s in samples])
    assert len({tuple(sample.response_ids) for sample in samples}) == 8


def _ends(whole, ids, said):
    return whole[len(ids) : len(ids) + len(said.response_ids)] == said.response_ids


def test_many_sessions_at_once(play):
    samples, calls = play("two_turns", n=64)
    assert len(samples) == 64
    assert len(calls) == 128
    assert all(sample.measures["turns"] == 2 for sample in samples)


def test_the_example(play):
    samples, _ = play("examples.openai_agent.agent:solve", n=4, agent_options={"tries": 3})
    assert [sample.measures["turns"] for sample in samples] == [3] * 4  # noise is never a good reply


def test_one_at_a_time(play):
    """max_concurrent holds back whole samples: requests of two never mix."""
    _, calls = play("two_turns", n=4, max_concurrent=1)
    lengths = [len(ids) for ids, _ in calls]
    assert all(second > first for first, second in zip(lengths[::2], lengths[1::2], strict=True))


def test_an_agent_that_raises_costs_its_sample_only(play, caplog):
    samples, _ = play("raises_later", n=3, failure_reward=-1.0)
    for sample in samples:
        assert sample.finish_reason == "error"
        assert sample.measures["failed"] == 1
        assert 0 < len(sample.response_ids) <= 8
        assert sample.turns[-1].reward == -1
    said = [record.message for record in caplog.records if "the agent failed" in record.message]
    assert len(said) == 1
    assert "KeyError: 'no such thing'" in said[0]
    with pytest.raises(RunError, match=r"no such thing.*on_error is fail"):
        play("raises_later", n=3, on_error="fail")


@pytest.mark.parametrize(
    ("agent", "end", "reward"),
    [
        ("raises_at_once", "error", -2),
        ("exits", "error", -2),
        ("exits_in_its_thread", "error", -2),
        ("cancels_itself", "error", -2),
        ("hangs", "time", -2),
        ("hangs_in_its_thread", "time", -2),
        ("never_asks", "stop", 1),
    ],
)
def test_a_policy_that_was_never_asked(play, prompt, agent, end, reward):
    start = time.monotonic()
    samples, calls = play(agent, n=2, timeout_s=0.5, failure_reward=-2.0)
    assert time.monotonic() - start < 5
    for sample in samples:
        assert sample.prompt_ids == list(prompt.ids)
        assert sample.response_ids == sample.loss_mask == sample.logprobs == []
        assert (sample.text, sample.finish_reason) == ("", end)
        assert (sample.oldest_version, sample.newest_version) == (0, 0)
        assert [turn.reward for turn in sample.turns] == [reward]
        assert sample.measures["turns"] == sample.measures["answers"] == 0
    assert all(len(said.response_ids) == 1 for _, said in calls)


def test_a_full_context_ends_the_sample_and_is_no_failure(play):
    [sample], _ = play("fills_the_context")
    assert sample.finish_reason == "length"
    assert len(sample.response_ids) <= 160
    assert (sample.measures["over_tokens"], sample.measures["failed"]) == (1, 0)


def test_a_reward_that_is_no_number(play):
    [sample], _ = play("bad_reward")
    assert sample.measures["failed"] == 1


def test_agent_options_and_bad_agents(play):
    [sample], _ = play("never_asks", agent_options={"bonus": 0.5})
    assert sample.turns[-1].reward == 1.5
    for options, expected in [
        ({}, "give one of the options agent"),
        ({"agent": "openai_agents:no_such"}, "has no 'no_such'"),
        ({"agent": "openai_agents:AGAIN"}, "is not callable"),
        ({"agent": "openai_agents:never_asks", "agent_options": {"bonsu": 1}}, "unexpected keyword argument 'bonsu'"),
        ({"agent": "json:loads"}, "missing a required argument: 's'"),
        ({"agent": "openai_agents:hangs", "command": ["true"]}, "give one of the options agent"),
        ({"command": []}, "command has no program"),
        ({"command": ["true"], "agent_options": {"a": 1}}, "agent_options are for a function"),
        ({"agent": "openai_agents:hangs", "timeout_s": 0}, "timeout_s must be greater than 0"),
        ({"agent": "openai_agents:hangs", "sampling": "mine"}, "sampling"),
        ({"agnet": "openai_agents:hangs"}, "did you mean 'agent'"),
    ]:
        with pytest.raises(UserError) as error:
            play(**options)
        assert expected in str(error.value)
        assert "\n" not in str(error.value)


SCRIPT = """
import json, os, subprocess, sys, time
from openai import OpenAI
task = json.load(sys.stdin)
client = OpenAI()
reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"], max_tokens=8)
left = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "a").write(f"{left.pid}\\n")
if len(sys.argv) > 2:
    print("x" * 10_000_000, flush=True)
    time.sleep(60) if sys.argv[2] == "hang" else sys.exit("no more")
print("working")
print(json.dumps({"reward": task["answer"] == "5", "level": task["metadata"]["level"]}))
"""


@pytest.mark.parametrize(
    ("mode", "end", "reward"), [([], None, 1.0), (["hang"], "time", -1.0), (["fail"], "error", -1.0)]
)
def test_a_command(play, tmp_path, caplog, mode, end, reward):
    """Even what it started itself is gone at the end."""
    script, pids = tmp_path / "agent.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(pids), *mode]
    [sample], [(_, said)] = play(command=command, timeout_s=4 if mode == ["hang"] else 60, failure_reward=-1.0)
    assert sample.response_ids == said.response_ids
    assert sample.turns[-1].reward == reward
    assert sample.finish_reason == (end or said.finish_reason)
    assert sample.measures.get("level") == (None if mode else 1)
    if mode == ["fail"]:
        assert "exit code 1: no more" in caplog.text
    [left] = map(int, pids.read_text().split())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline  # of its sixty seconds
        time.sleep(0.01)


def test_a_command_that_is_not_there(play, caplog):
    [sample], _ = play(command=["/no/such/program"])
    assert sample.measures["failed"] == 1
    assert "/no/such/program" in caplog.text


def test_the_endpoint_says_no_as_openai_does(byte_tokenizer, policy_engine, run, prompt, caplog):
    """With the real client, and without it."""
    environment = make_environment(
        EnvironmentConfig(name="openai_agent", options={"agent": "openai_agents:hangs", "timeout_s": 60}),
        byte_tokenizer,
    )
    found = asyncio.Queue()

    async def visit(prompt, base_url, api_key):
        found.put_nowait(base_url)
        await asyncio.Event().wait()

    environment.play = visit

    async def work():
        await environment.open()
        working = asyncio.ensure_future(environment.run(prompt, 1, PARAMS, policy_engine.generate))
        url = await found.get()
        async with AsyncOpenAI(base_url=url, api_key="x") as client, httpx.AsyncClient() as http:
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(**ASK, n=3)
            assert error.value.param == "n"
            long = [{"role": "user", "content": "x" * 500}]
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(model="any", messages=long)
            assert error.value.code == "context_length_exceeded"
            with pytest.raises(NotFoundError, match="no such session"):
                await client.with_options(base_url=url.replace("/s/", "/s/x")).models.list()
            with pytest.raises(NotFoundError, match="Not Found"):
                await client.embeddings.create(model="any", input="x")
            # One address for all sessions, for clients that send a header.
            environment.endpoint.name(url, "the trace")
            named = client.with_options(base_url=environment.endpoint.url)
            with pytest.raises(NotFoundError, match="no such session"):
                await named.models.list()
            named = named.with_options(default_headers={"X-Session-ID": "the trace"})
            await named.chat.completions.create(**ASK, max_tokens=4)
            reply = await http.post(f"{url}/chat/completions", content=b"{")
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the body is no JSON")
            reply = await http.get(f"{url}/chat/completions")
            assert (reply.status_code, reply.json()["error"]["type"]) == (405, "invalid_request_error")
            await client.chat.completions.create(**ASK, temperature=0.1, max_tokens=4)
            # Whoever hangs up ends the request, and its tokens are no part of the sample.
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{url}/chat/completions", json={**ASK, "max_tokens": 100}, timeout=0.005)
            answer = await client.chat.completions.create(**ASK, stop="\x00", max_tokens=4)
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        environment.play = None
        working.cancel()
        await asyncio.wait({working}, timeout=5)
        assert working.cancelled()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/models")).status_code == 404
            named = await http.get(f"{environment.endpoint.url}/models", headers={"X-Session-ID": "the trace"})
            assert named.status_code == 404
        await environment.close()

    run(work())


def test_a_port_that_is_taken(byte_tokenizer, run):
    options = {"agent": "openai_agents:hangs", "host": "192.0.2.1"}  # TEST-NET-1: nobody's
    environment = make_environment(EnvironmentConfig(name="openai_agent", options=options), byte_tokenizer)

    async def work():
        try:
            await environment.open()
        finally:
            await environment.close()

    with pytest.raises(UserError, match=r"host='192.0.2.1'"):
        run(work())


def test_tasks_of_verifiers_need_their_package(byte_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as if it was not installed, wherever it is
    config = EnvironmentConfig(name="verifiers", options={"env": {"taskset": {"id": "sums_tasks"}}})
    with pytest.raises(UserError, match="needs the package verifiers") as error:
        make_environment(config, byte_tokenizer)
    assert "\n" not in str(error.value)
