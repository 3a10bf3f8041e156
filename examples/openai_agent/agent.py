"""An ordinary agent, written against the package `openai`: it asks a question, and asks again if the reply is no good.

It knows nothing of rl_tpu. On its own, against any server that speaks the OpenAI API:

    OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python examples/openai_agent/agent.py MODEL "4 + 3 - 2 ="
"""

from __future__ import annotations

import asyncio
import os
import re
import sys

from openai import AsyncOpenAI

ANSWER = re.compile(r"<answer>\s*-?\d+\s*</answer>")
CLIENT = AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"))
"""One for all questions: making a client takes longer than a short answer."""


async def solve(messages: list[dict], model: str, base_url: str, api_key: str, tries: int = 2) -> list[dict]:
    """Ask until the reply shows how it was found and has its answer in tags, at most ``tries`` times."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(messages)
    for _ in range(tries):
        reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=32)
        text = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        if "=" in text and ANSWER.search(text):
            break
        messages.append({"role": "user", "content": "Step by step, please."})
    return messages


if __name__ == "__main__":
    model, question = sys.argv[1:]
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    for message in asyncio.run(solve([{"role": "user", "content": question}], model, **where)):
        print(f"{message['role']}: {message['content']}")
