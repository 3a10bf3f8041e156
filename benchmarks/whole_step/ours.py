"""What our side plugs into `python -m rl_tpu.train`: answers of drawn lengths, and the reward."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from benchmarks.whole_step import task
from rl_tpu.environments import Environment, Generate, Transcript
from rl_tpu.types import Prompt, Sample, SamplingParams


class DrawnLengths(Environment):
    """Every answer is as long as was drawn for it."""

    def __init__(self, tokenizer: Any, workload: str) -> None:
        super().__init__(tokenizer)
        self._lengths = task.lengths(workload)

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        drawn = [next(self._lengths) for _ in range(n)]
        if len(set(drawn)) == 1:
            completions = await generate(prompt.ids, replace(params, max_response_tokens=drawn[0]), n)
        else:
            each = (generate(prompt.ids, replace(params, max_response_tokens=length), 1) for length in drawn)
            completions = [completion for [completion] in await asyncio.gather(*each)]
        samples = []
        for completion in completions:
            transcript = Transcript(prompt)
            transcript.add_completion(completion)
            samples.append(transcript.finish(self.tokenizer))
        return samples


def digits(text: str, answer: Any, prompt: Prompt) -> float:
    return task.digits(text)
