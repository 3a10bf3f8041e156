"""An agent as jobs meet them: mostly good, at times it raises, hangs, or never asks; with some prompts all of that."""

import asyncio
import itertools

from openai import AsyncOpenAI

CALLS = itertools.count()


async def moody(messages, base_url, api_key, model):
    if "5" in messages[-1]["content"]:  # a whole group without a token
        return
    mood = next(CALLS) % 8
    if mood == 0:
        return
    if mood == 1:
        await asyncio.Event().wait()
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0.5)
        if mood == 2:
            raise KeyError("no such thing")
        messages = [*messages, first.choices[0].message.model_dump(), {"role": "user", "content": "Again, please."}]
        await client.chat.completions.create(model=model, messages=messages, max_tokens=24)
        if mood == 3:  # another conversation, shorter
            await client.chat.completions.create(model=model, messages=messages[:1], max_tokens=4)
