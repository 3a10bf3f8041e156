"""Agents of tests: some good, some bad. All but one talk to the policy with the package `openai`."""

import asyncio
import sys
import time

from openai import AsyncOpenAI, OpenAI

AGAIN = {"role": "user", "content": "No."}


async def two_turns(messages, base_url, api_key, model):
    """Always asks twice; says how long its conversation got."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=24)
            messages = [*messages, reply.choices[0].message.model_dump(exclude_none=True), AGAIN]
    return {"reward": 0.5, "messages": float(len(messages)), "notes": "no number"}


def streaming(messages, base_url, api_key, model):
    """Sync, in a thread, and asks for a stream."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, max_tokens=24, stream_options={"include_usage": True}
        )
        pieces, usage = [], None
        for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        messages = [*messages, {"role": "assistant", "content": "".join(pieces)}, AGAIN]
        last = client.chat.completions.create(model=model, messages=messages, logprobs=True, max_tokens=24)
        logprobs = [token.logprob for token in last.choices[0].logprobs.content]
        assert len(logprobs) == last.usage.completion_tokens
        assert last.usage.prompt_tokens > usage.total_tokens
        assert client.models.list().data[0].id == model
    return sum(logprobs)


def asks_once(messages, base_url, api_key, model):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model=model, messages=messages, max_tokens=8)


async def raises_later(prompt, **where):
    asks_of = asyncio.to_thread(asks_once, list(prompt.messages), where["base_url"], where["api_key"], where["model"])
    await asks_of
    raise KeyError("no such thing")


def raises_at_once():
    raise KeyError("no such thing")


async def exits():
    sys.exit("enough")


def exits_in_its_thread():
    sys.exit("enough")


async def cancels_itself():
    raise asyncio.CancelledError


async def hangs():
    await asyncio.Event().wait()


def hangs_in_its_thread():
    time.sleep(30)


def never_asks(answer, bonus=0.0):
    return float(answer == "5") + bonus


async def fills_the_context(messages, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            reply = await client.chat.completions.create(model=model, messages=messages)
            messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}, AGAIN]


def bad_reward():
    return float("nan")
