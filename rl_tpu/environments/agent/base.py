"""What all environments have in common whose agents speak the OpenAI API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import numbers
import urllib.request
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from rl_tpu.environments.agent.server import Endpoint
from rl_tpu.environments.agent.session import Node, Session
from rl_tpu.environments.base import Environment, Generate
from rl_tpu.environments.calling import together
from rl_tpu.environments.chat import Chat
from rl_tpu.environments.conversation import require_positive
from rl_tpu.environments.template_check import TemplateCheck
from rl_tpu.errors import RunError
from rl_tpu.registry import describe
from rl_tpu.types import Prompt, Sample, SamplingParams, Turn, VersionSpan

log = logging.getLogger(__name__)

MAX_TEMPLATES = 64
"""Template options, such as sets of tools, that are kept ready."""
GRACE_S = 5.0
"""What an agent gets to clean up after it was cancelled."""


@dataclass(frozen=True)
class Outcome:
    """What an agent's work on one sample came to; ``end`` is why the sample ended if not because of its last turn."""

    reward: float = 0.0
    measures: Mapping[str, float] = field(default_factory=dict)
    end: str | None = None


class AgentEnvironment(Environment):
    """Every sample is a session of an HTTP endpoint, in which an agent works; `play` says what that agent is.

    All n samples of a prompt are worked on at the same time, at most ``max_concurrent`` in all. One takes ``timeout_s`` at
    most, counted from its own start.

    The conversation with most of the policy's tokens becomes the sample; ``text``, which rewards read, is its last answer.
    What `play` returns is the reward of its last turn. It ends as its last turn did, or

    - ``error`` where the agent raises, ``time`` where it is late: the sample is what the policy had written until then, and
      gets ``failure_reward`` besides what reward functions give. With ``on_error`` fail an agent that raises ends the run.
    - ``length`` where the agent was told that the context is full, whether or not it raises then.

    Where the policy was never asked, the response is empty and nothing is learned from it; its reward counts in the group
    as any other.

    ``sampling`` says what happens to a request's temperature, top_p and the like: with run they are ignored (and said so
    once) in favour of the run's own, with strict the request is refused. ``template`` has options of the chat template,
    which a request's own go before.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        timeout_s: float = 600.0,
        max_concurrent: int = 256,
        on_error: Literal["sample", "fail"] = "sample",
        failure_reward: float = 0.0,
        sampling: Literal["run", "strict"] = "run",
        host: str = "127.0.0.1",
        port: int = 0,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        require_positive(timeout_s=timeout_s, max_concurrent=max_concurrent)
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._failure_reward = failure_reward
        self._strict = sampling == "strict"
        self._gate = asyncio.Semaphore(max_concurrent)
        self.endpoint = Endpoint(host, port)
        self._options = dict(template or {})
        self._template = lru_cache(MAX_TEMPLATES)(self._make_template)

    @property
    def template_options(self) -> Mapping[str, Any]:
        return self._options

    @abstractmethod
    async def play(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        """Have the agent work on the prompt; what it returns is read by `outcome_of`. Cancelled when it is late."""

    async def open(self) -> None:
        await self.endpoint.open()
        if urllib.request.getproxies().get("http") and not urllib.request.proxy_bypass(self.endpoint.host):
            log.warning(
                "HTTP_PROXY is set and NO_PROXY does not have %s: agents may not reach the policy", self.endpoint.host
            )

    async def close(self) -> None:
        await self.endpoint.close()

    async def run(self, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> list[Sample]:
        return await together(self._sample(number, prompt, n, params, generate) for number in range(n))

    def _chat(self, options: Mapping[str, Any]) -> Chat:
        return self._template(json.dumps(options, sort_keys=True))[0]

    def _make_template(self, options: str) -> tuple[Chat, TemplateCheck]:
        """The chat template with the options (JSON) of a request, and the check of it. Kept: a chat remembers renderings."""
        chat = Chat(self.tokenizer, {**self.template_options, **json.loads(options)})
        return chat, TemplateCheck(chat)

    async def _sample(self, number: int, prompt: Prompt, n: int, params: SamplingParams, generate: Generate) -> Sample:
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + number)
        async with self._gate:
            session = Session(self.tokenizer, self._chat, prompt, params, generate, seed_step=n, strict=self._strict)
            base_url = self.endpoint.add(session)
            try:
                outcome = await self._work(session, prompt, base_url)
            finally:
                self.endpoint.remove(base_url)
                await session.close()
        if session.ignored:
            names = ", ".join(sorted(session.ignored))
            self.warn_once("ignored", f"an agent asked for {names} other than the run's, which hold")
        longest = session.longest()
        sample = self._recorded(longest, outcome) if longest else await _empty(prompt, params, generate, outcome)
        sample.turns[-1].reward = outcome.reward
        reason = sample.finish_reason
        sample.measures = {
            **outcome.measures,
            **sample.measures,
            "turns": float(len(sample.turns) if longest else 0),
            "answers": float(session.answers),
            "other_conversations": float(max(0, session.conversations - 1)),
            "over_tokens": float(reason == "length"),
            "over_time": float(reason == "time"),
            "failed": float(reason == "error"),
        }
        return sample

    async def _work(self, session: Session, prompt: Prompt, base_url: str) -> Outcome:
        """The agent's work within its deadline. Raises what broke an engine meanwhile."""
        work = asyncio.ensure_future(_contained(self.play(prompt, base_url, base_url.split("/")[-2])))
        try:
            await asyncio.wait({work, session.failure}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            if not work.done():
                self.warn_once("time", f"the agent was not done with prompt {prompt.id!r} within {self._timeout_s:g} s")
                return Outcome(self._failure_reward, end="time")
            outcome = self._outcome(work, session, prompt)
        finally:
            if work.cancel():
                await asyncio.wait({work}, timeout=GRACE_S)
        return dataclasses.replace(outcome, end="length") if session.context_exceeded else outcome

    def _outcome(self, work: asyncio.Future[Any], session: Session, prompt: Prompt) -> Outcome:
        try:
            return outcome_of(work.result())
        except RunError:
            raise
        except Exception as error:
            if session.context_exceeded:
                return Outcome()
            message = f"the agent failed on prompt {prompt.id!r}: {describe(error)}"
            if self._on_error == "fail":
                raise RunError(f"{message} (environment.options.on_error is fail)") from error
            self.warn_once("error", message)
            return Outcome(self._failure_reward, end="error")

    def _recorded(self, longest: Node, outcome: Outcome) -> Sample:
        transcript = longest.transcript
        sample = transcript.finish(self.tokenizer, transcript.last_turn_ids(), outcome.end)
        sample.measures["tokens"] = float(transcript.environment_tokens)
        _, check = self._template(longest.key[0])
        differs = check.differs(transcript)
        if differs is not None:
            sample.measures["template_mismatch"] = float(differs)
        return sample


def outcome_of(returned: Any) -> Outcome:
    """What an agent returns: its reward as a number, or a dict with `reward`, whose other numbers are measures of the sample.
    Anything else, such as the answer it gives its users, is not looked at.

    Raises TypeError or ValueError if a reward is no finite number.
    """
    values: Mapping[Any, Any] = {}
    if isinstance(returned, Mapping) and "reward" in returned:
        values = returned
    elif isinstance(returned, numbers.Real):
        values = {"reward": returned}
    reward = values.get("reward", 0.0)
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the agent's reward must be a number, it is {reward!r}")
    measures = {str(name): float(value) for name, value in values.items() if isinstance(value, numbers.Real)}
    if wrong := [name for name, value in measures.items() if not math.isfinite(value)]:
        raise ValueError(f"the agent's {wrong[0]} is {measures[wrong[0]]}")
    measures.pop("reward", None)
    return Outcome(float(reward), measures)


async def _contained(play: Coroutine[Any, Any, Any]) -> Any:
    """An agent that exits, or cancels itself, ends neither the run nor the task that waits for it."""
    try:
        return await play
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():  # by us
            raise
        raise RuntimeError("the agent cancelled itself") from error


async def _empty(prompt: Prompt, params: SamplingParams, generate: Generate, outcome: Outcome) -> Sample:
    """A sample without a token. The engine says under which policy version it would have been written: one token is
    sampled for that, and thrown away."""
    [completion] = await generate(prompt.ids, dataclasses.replace(params, max_response_tokens=1), 1)
    span = VersionSpan(completion.spans[0].version, 0, 0)
    return Sample(list(prompt.ids), [], [], [], [span], outcome.end or "stop", turns=[Turn(0, 0)])
