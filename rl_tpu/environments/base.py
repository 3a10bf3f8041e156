"""What an environment is: it turns a prompt into samples, in as many turns as it likes. Tokens in, tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_tpu.types import Completion, Prompt, Sample, SamplingParams

Generate = Callable[[Sequence[int], SamplingParams, int], Awaitable[list[Completion]]]
"""``await generate(ids, params, n)``: n completions of the token ids, from a rollout engine."""


class Environment(ABC):
    """Made once per run. ``tokenizer`` is the policy's Hugging Face tokenizer; options are keyword arguments."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        """``n`` samples of the prompt, not yet scored.

        A sample's response, with everything the environment added to it, has at most ``params.max_response_tokens``
        tokens. Many calls run at the same time on one object: keep what belongs to a sample in local variables.
        """
