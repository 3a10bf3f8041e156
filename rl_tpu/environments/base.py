"""What an environment is: it turns a prompt into samples, in as many turns as it likes. Tokens in, tokens out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from rl_tpu.environments.chat import Chat
from rl_tpu.types import Completion, Prompt, Sample, SamplingParams

log = logging.getLogger(__name__)

Generate = Callable[[Sequence[int], SamplingParams, int], Awaitable[list[Completion]]]
"""``await generate(ids, params, n)``: n completions of the token ids, from a rollout engine. All calls for one prompt go to
the same engine as long as it serves, so that what its samples have in common is read once."""


class Environment(ABC):
    """Made once per run, `open` around all its use. ``tokenizer`` is the policy's Hugging Face tokenizer; options are keyword
    arguments."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._warned: set[str] = set()

    def warn_once(self, kind: str, message: str) -> None:
        """Log the first of its kind in a run; measures count the others."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s. Others like it are only counted.", message)

    @property
    def template_options(self) -> Mapping[str, Any]:
        """What the chat template gets besides the messages of a prompt, for example ``tools``."""
        return {}

    @cached_property
    def chat(self) -> Chat:
        """The chat template with these options: renders what the environment says after a turn of the policy."""
        return Chat(self.tokenizer, self.template_options)

    async def open(self) -> None:  # noqa: B027 - most have nothing to start
        """Start what the environment needs, for example processes or a server. Raises UserError or RunError."""

    async def close(self) -> None:  # noqa: B027
        """End it. Also called where `open` failed."""

    @abstractmethod
    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        """``n`` samples of the prompt, not yet scored by reward functions; a turn may have the environment's own reward.

        A sample's response, with everything the environment added to it, has at most ``params.max_response_tokens``
        tokens. Many calls run at the same time on one object: keep what belongs to a sample in local variables.
        """
