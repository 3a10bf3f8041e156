"""Answers of which a few are 20 times longer, and a reward that takes half a second.

Which answer is long depends on the prompt alone: whatever the pacing, the same prompts are the same work.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

from rl_tpu.environments import Environment, Generate, Transcript
from rl_tpu.rewards.registry import Response, takes_group
from rl_tpu.types import Prompt, Sample, SamplingParams

SHORT = (8, 16)
"""Tokens of an ordinary answer, each number equally often."""
LONGER = 20
LONG_SHARE = 1 / 32
REWARD_S = 0.5


def answer_tokens(prompt_id: str, number: int) -> int:
    """Tokens of the prompt's answer with that number."""
    dice = random.Random(f"{prompt_id} {number}")
    return dice.randint(*SHORT) * (LONGER if dice.random() < LONG_SHARE else 1)


class HeavyTail(Environment):
    """One turn. The model ends no answer by itself, so each is as long as it is allowed to be."""

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        lengths = [answer_tokens(prompt.id, number) for number in range(n)]
        each = [generate(prompt.ids, replace(params, max_response_tokens=length), 1) for length in lengths]
        samples = []
        for [completion] in await asyncio.gather(*each):
            transcript = Transcript(prompt)
            transcript.add_completion(completion)
            samples.append(transcript.finish(self.tokenizer))
        return samples


@takes_group
def slow_digits(responses: list[Response], answer: Any, prompt: Prompt) -> list[float]:
    """The share of digits in each text, after a while."""
    time.sleep(REWARD_S)
    return [sum(map(str.isdigit, response.text)) / max(1, len(response.text)) for response in responses]
