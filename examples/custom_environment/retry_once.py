"""An environment of your own: after a wrong answer the policy is told so and may answer once more."""

from __future__ import annotations

import asyncio
from typing import Any

from rl_tpu.environments import Environment, Generate, Transcript
from rl_tpu.rewards.extract import final_answer
from rl_tpu.types import Completion, Prompt, Sample, SamplingParams


class RetryOnce(Environment):
    """The reward judges the last answer; the loss learns from both answers and not from the message in between."""

    def __init__(self, tokenizer: Any, feedback: str = "That is wrong. Try again.") -> None:
        super().__init__(tokenizer)
        self.feedback = feedback

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        first = await generate(prompt.ids, params, n)
        return await asyncio.gather(*(self._second_chance(prompt, answer, params, generate) for answer in first))

    async def _second_chance(
        self, prompt: Prompt, answer: Completion, params: SamplingParams, generate: Generate
    ) -> Sample:
        transcript = Transcript(prompt)
        transcript.add_completion(answer)
        message = transcript.render(self.chat, [{"role": "user", "content": self.feedback}])
        room = params.max_response_tokens - transcript.response_tokens - len(message.ids)
        if answer.finish_reason == "stop" and room > 0 and not self._is_right(answer, prompt):
            transcript.add_messages(message)
            [answer] = await generate(transcript.ids, transcript.remaining(params), 1)
            transcript.add_completion(answer)
        return transcript.finish(self.tokenizer, answer.response_ids)

    def _is_right(self, answer: Completion, prompt: Prompt) -> bool:
        text = self.tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        return final_answer(text) == str(prompt.answer)
