"""One question, one answer."""

from __future__ import annotations

from rl_tpu.environments.base import Environment, Generate
from rl_tpu.environments.transcript import Transcript
from rl_tpu.types import Prompt, Sample, SamplingParams


class SingleTurn(Environment):
    """The policy answers once; all n samples come from one request, so that the engine reads the prompt once."""

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        samples = []
        for completion in await generate(prompt.ids, params, n):
            transcript = Transcript(prompt)
            transcript.add_completion(completion)
            samples.append(transcript.finish(self.tokenizer))
        return samples
