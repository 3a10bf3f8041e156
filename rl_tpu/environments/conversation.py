"""The policy and an environment take turns, within budgets."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from rl_tpu.environments.base import Environment, Generate
from rl_tpu.environments.calling import together
from rl_tpu.environments.chat import Message
from rl_tpu.environments.template_check import TemplateCheck
from rl_tpu.environments.transcript import Transcript
from rl_tpu.errors import RunError, UserError
from rl_tpu.registry import describe
from rl_tpu.types import Completion, Prompt, Sample, SamplingParams

SHARES = {"length": "over_tokens", "turns": "over_turns", "time": "over_time", "error": "failed"}
"""Measure, 1 or 0, of each way to end but the usual one (``stop``), by ``finish_reason``."""


@dataclass(frozen=True)
class Reply:
    """What an environment does after a turn of the policy.

    ``messages`` are said to the policy, which then writes its next turn; without any, or with ``done``, the sample ends.
    ``reward`` is for the policy's turn.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


@dataclass
class Progress:
    """One sample under way. ``measures`` are added to the sample's."""

    prompt: Prompt
    transcript: Transcript
    measures: dict[str, float]


class Conversation(Environment):
    """What all environments of several turns share: a subclass says how it answers a turn.

    A sample ends when the policy or the environment says so (``finish_reason`` ``stop``), or at the first budget that is
    used up: tokens of a turn or of the whole response (``length``), turns of the policy (``turns``), time (``time``). The
    first turn is always waited for; of a later one that time cuts off nothing is kept. Where the environment itself fails,
    that ends its sample (``error``), or with ``on_error`` ``fail`` the run. Rewards are given in every case.

    Args:
        max_turns: of the policy.
        max_turn_tokens: tokens of one turn of the policy.
        timeout_s: from the start of the first turn to the end of the sample.
        on_error: what a failure of the environment ends, its ``sample`` or the run (``fail``).
        reward_text: what reward functions read, the policy's ``last_turn`` or the ``whole`` response.
        template: more options of the chat template, for example ``{enable_thinking: false}``.
    """

    counts: ClassVar[tuple[str, ...]] = ()
    """Measures that `respond` adds to; every sample has them, from 0."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        timeout_s: float = 600.0,
        reward_text: Literal["last_turn", "whole"] = "last_turn",
        on_error: Literal["sample", "fail"] = "sample",
        template: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        require_positive(max_turns=max_turns, max_turn_tokens=max_turn_tokens, timeout_s=timeout_s)
        self.max_turns = max_turns
        self.max_turn_tokens = max_turn_tokens
        self.timeout_s = timeout_s
        self.reward_text = reward_text
        self.on_error = on_error
        self.template = dict(template or {})

    @property
    def template_options(self) -> Mapping[str, Any]:
        return self.template

    @cached_property
    def _check(self) -> TemplateCheck:
        return TemplateCheck(self.chat)

    @abstractmethod
    async def respond(self, progress: Progress) -> Reply:
        """What to do after the policy's last turn. It may count in ``progress.measures``.

        Raises RunError for what must end the run; any other exception ends the sample (`on_error`).
        """

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        # One request for all first turns: the engine reads the prompt once.
        first = await generate(prompt.ids, self._turn_params(Transcript(prompt), params), n)
        samples = (self._sample(prompt, i, params, generate, turn, deadline) for i, turn in enumerate(first))
        return await together(samples)

    async def _sample(
        self,
        prompt: Prompt,
        number: int,
        params: SamplingParams,
        generate: Generate,
        first: Completion,
        deadline: float,
    ) -> Sample:
        if params.seed is not None:
            params = replace(params, seed=params.seed + number)
        progress = Progress(prompt, Transcript(prompt), dict.fromkeys(("seconds", *self.counts), 0.0))
        time_limit = asyncio.timeout_at(deadline)
        try:
            async with time_limit:
                reason = await self._take_turns(progress, first, params, generate)
        except TimeoutError:
            if not time_limit.expired():
                raise
            reason = "time"
        except _RespondError as failure:
            reason = "error"
            self._count_failure(failure)
        return self._finish(progress, reason)

    async def _take_turns(
        self, progress: Progress, completion: Completion, params: SamplingParams, generate: Generate
    ) -> str:
        """From the first turn to the end of the sample; why it ended."""
        transcript = progress.transcript
        transcript.add_completion(completion)
        while completion.finish_reason == "stop":
            with _respond_errors():
                reply = await self._timed_respond(progress)
                transcript.turns[-1].reward = float(reply.reward)
            if reply.done or not reply.messages:
                break
            if len(transcript.turns) >= self.max_turns:
                return "turns"
            with _respond_errors():
                rendered = transcript.render(self.chat, reply.messages)
            if transcript.response_tokens + len(rendered.ids) >= params.max_response_tokens:
                return "length"
            transcript.add_messages(rendered)
            [completion] = await generate(transcript.ids, self._turn_params(transcript, params), 1)
            transcript.add_completion(completion)
        return completion.finish_reason

    async def _timed_respond(self, progress: Progress) -> Reply:
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            return await self.respond(progress)
        finally:
            progress.measures["seconds"] += clock() - start

    def _turn_params(self, transcript: Transcript, params: SamplingParams) -> SamplingParams:
        left = transcript.remaining(params)
        limit = self.max_turn_tokens or left.max_response_tokens
        return replace(left, max_response_tokens=min(limit, left.max_response_tokens))

    def _finish(self, progress: Progress, reason: str) -> Sample:
        transcript = progress.transcript
        text_ids = transcript.last_turn_ids() if self.reward_text == "last_turn" else None
        sample = transcript.finish(self.tokenizer, text_ids, reason)
        sample.measures |= {"turns": float(len(sample.turns)), "tokens": float(transcript.environment_tokens)}
        sample.measures |= {name: float(reason == end) for end, name in SHARES.items()}
        sample.measures |= progress.measures
        differs = self._check.differs(transcript)
        if differs is not None:
            sample.measures["template_mismatch"] = float(differs)
        return sample

    def _count_failure(self, failure: _RespondError) -> None:
        error = failure.__cause__
        message = describe(error)
        if self.on_error == "fail":
            raise RunError(f"the environment failed: {message} (environment.options.on_error is fail)") from error
        self.warn_once("respond", f"the environment failed and ended its sample: {message}")


class _RespondError(Exception):
    """`respond` raised its cause."""


@contextmanager
def _respond_errors():
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise _RespondError from error


def require_positive(**options: float | None) -> None:
    """Raise UserError for one that is neither None nor greater than 0."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise UserError(f"environment.options.{name} must be greater than 0, it is {value}")
