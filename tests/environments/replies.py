"""Functions that answer the policy, by import path."""

from __future__ import annotations

import asyncio
import time

from rl_tpu.environments import Reply


def again(messages, prompt):
    """The user wants one more answer, for ever."""
    return f"Not {messages[-1]['content']}."


def guess(messages, prompt, *, bonus=0.0):
    """A game: too low, too high, or right; warmer turns earn more."""
    number, answer = int(messages[-1]["content"]), int(prompt.answer)
    if number == answer:
        return Reply(reward=1.0 + bonus, done=True)
    hint = "Higher." if number < answer else "Lower."
    return Reply([{"role": "user", "content": hint}], reward=-abs(number - answer) / 10)


async def two_voices(messages, prompt):
    await asyncio.sleep(0)
    if len(messages) > 3:
        return None
    return [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]


class Once:
    """A callable object."""

    def __call__(self, messages, prompt):
        return {"role": "user", "content": "Really?"} if len(messages) < 3 else None


once = Once()


def moody(messages, prompt):
    """Does what the policy asks for."""
    if messages[-1]["content"] == "raise":
        raise KeyError("mood")
    if messages[-1]["content"] == "exit":
        raise SystemExit(3)
    if messages[-1]["content"] == "hang":
        time.sleep(20)
    if messages[-1]["content"] == "number":
        return 5
    return "Go on." if len(messages) < 3 else None


async def slow(messages, prompt):
    await asyncio.sleep(20)


no_function = 5
