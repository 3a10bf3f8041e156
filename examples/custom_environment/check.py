"""A function for the environment `multi_turn`: the policy is told whether it is right, and may try again."""

from __future__ import annotations

from rl_tpu.environments import Reply
from rl_tpu.rewards.extract import final_answer


def check(messages, prompt, *, feedback: str = "That is wrong. Try again.", cost: float = 0.1) -> Reply:
    """Every wrong answer costs ``cost``, at the turn that gave it; the right one ends the conversation."""
    if final_answer(messages[-1]["content"]) == str(prompt.answer):
        return Reply(done=True)
    return Reply([{"role": "user", "content": feedback}], reward=-cost)
