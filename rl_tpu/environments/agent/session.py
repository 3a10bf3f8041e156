"""One sample while an agent works on it: every answer of the policy, in the context that it was given in."""

from __future__ import annotations

import asyncio
import bisect
import copy
import dataclasses
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_tpu.environments.agent.protocol import ApiError, ChatRequest, message_key, parse_message
from rl_tpu.environments.agent.responses import Answer
from rl_tpu.environments.base import Generate
from rl_tpu.environments.chat import Chat
from rl_tpu.environments.hermes import parse_calls
from rl_tpu.environments.transcript import Transcript
from rl_tpu.errors import UserError
from rl_tpu.registry import one_line
from rl_tpu.types import Completion, Prompt, SamplingParams, VersionSpan


@dataclass
class Node:
    """A conversation up to an answer of the policy. ``key`` is the template's options and the messages up to the answer,
    ``policy_tokens`` counts what the policy wrote of it."""

    key: tuple[str, ...]
    chat: Chat
    transcript: Transcript
    policy_tokens: int
    continued: bool = False


class Session:
    """Answers an agent's requests with what the policy samples, and keeps the exact tokens.

    A request that begins with a recorded conversation continues its tokens; any other begins a new one. Answers therefore
    form trees, and every path from a root to a leaf is a conversation. A conversation, with the prompt that the agent
    gave it, has at most as many tokens as ``prompt`` and ``params.max_response_tokens`` together.

    The run says how tokens are drawn: what a request says of it is ignored, or with ``strict`` refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        chats: Callable[[dict[str, Any]], Chat],
        prompt: Prompt,
        params: SamplingParams,
        generate: Generate,
        seed_step: int = 1,
        strict: bool = False,
    ) -> None:
        """``chats`` has the chat template with given options. ``params.seed``, if there is one, is that of the first answer;
        every further one adds ``seed_step``.
        """
        self._tokenizer = tokenizer
        self._chats = chats
        self._prompt = prompt
        self._params = params
        self._generate = generate
        self._seed_step = seed_step
        self._strict = strict
        self._nodes: list[Node] = []
        self._running: set[asyncio.Task[list[Completion]]] = set()
        self._asked = 0
        self.context_tokens = len(prompt.ids) + params.max_response_tokens
        self.context_exceeded = False
        """Whether a request was refused because nothing was left to write in."""
        self.ignored: set[str] = set()
        """Fields of requests that were not heeded."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the RunError of an engine: the run's affair, not the agent's."""

    @property
    def answers(self) -> int:
        return len(self._nodes)

    @property
    def conversations(self) -> int:
        return sum(not node.continued for node in self._nodes)

    async def chat(self, request: ChatRequest) -> Answer:
        """The policy's answer. Raises ApiError."""
        self._check_sampling(request)
        chat = self._chats(request.template_options)
        keys = (json.dumps(request.template_options, sort_keys=True), *map(message_key, request.messages))
        parent = self._parent(keys)
        transcript = self._extended(parent, chat, request.messages)
        room = min(
            self.context_tokens - len(transcript.ids), self._params.max_response_tokens - transcript.response_tokens
        )
        if room < 1:
            self.context_exceeded = True
            raise ApiError(
                f"This model's maximum context length is {self.context_tokens} tokens, and the messages leave no room for"
                f" an answer: they have {len(transcript.ids)} tokens",
                code="context_length_exceeded",
                param="messages",
            )
        prompt_tokens = len(transcript.ids)
        completion = await self._sample(transcript.ids, min(room, request.max_tokens or room))
        completion, text = self._until_stop(completion, request.stop)
        transcript.add_completion(completion)
        answer = self._answer(completion, text, prompt_tokens, "tools" in request.template_options)
        said = message_key(parse_message(answer.message, "answer"))
        tokens = len(completion.response_ids) + (parent.policy_tokens if parent else 0)
        if parent:
            parent.continued = True
        self._nodes.append(Node((*keys, said), chat, transcript, tokens))
        return answer

    def longest(self) -> Node | None:
        """The conversation with most of the policy's tokens, of equals the latest. None if there was no answer."""
        return max(reversed(self._nodes), key=lambda node: node.policy_tokens, default=None)

    async def close(self) -> None:
        """Cancel what is being written: the agent has ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # whoever waits for it has had it
        else:
            self.failure.cancel()

    def _check_sampling(self, request: ChatRequest) -> None:
        run = dataclasses.asdict(self._params)
        other = {name for name, value in request.sampling.items() if run.get(name) != value}
        if other and self._strict:
            raise ApiError(
                f"{', '.join(sorted(other))} is other than the run's: the policy is sampled as the run's configuration says",
                param=min(other),
            )
        self.ignored |= other

    def _parent(self, keys: tuple[str, ...]) -> Node | None:
        """The longest recorded conversation that ``keys`` go on with."""
        fitting = [node for node in self._nodes if len(node.key) < len(keys) and keys[: len(node.key)] == node.key]
        return max(fitting, key=lambda node: len(node.key), default=None)

    def _extended(self, parent: Node | None, chat: Chat, messages: list[dict[str, Any]]) -> Transcript:
        """The transcript up to the answer: recorded tokens, and what is rendered after them."""
        try:
            if parent is None:
                text = chat.render(messages, generation_prompt=True)
                ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                return Transcript(dataclasses.replace(self._prompt, ids=tuple(ids), messages=tuple(messages)))
            transcript = copy.deepcopy(parent.transcript)
            new = messages[len(parent.key) - 1 :]  # a key is the template's options and the messages
            transcript.add_messages(transcript.render(chat, new))
            return transcript
        except UserError as error:
            raise ApiError(str(error), param="messages") from error

    async def _sample(self, ids: list[int], max_tokens: int) -> Completion:
        seed = self._params.seed
        if seed is not None:
            seed += self._asked * self._seed_step
        self._asked += 1
        params = dataclasses.replace(self._params, max_response_tokens=max_tokens, seed=seed)
        task = asyncio.ensure_future(self._generate(ids, params, 1))
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._running.discard(task)
        if task.cancelled():
            raise ApiError("the session has ended", status=410)
        if error := task.exception():
            if not self.failure.done():
                self.failure.set_exception(error)
            raise ApiError(f"the policy's engine failed: {one_line(error)}", status=503) from error
        [completion] = task.result()
        return completion

    def _until_stop(self, completion: Completion, stop: tuple[str, ...]) -> tuple[Completion, str]:
        """The completion up to the token that completes a stop string, and its text before the string."""
        ids = completion.response_ids
        text = self._text(ids)
        if not any(string in text for string in stop):
            return completion, text
        # Fewest tokens whose text has a stop string.
        count = (
            bisect.bisect_left(range(len(ids)), True, key=lambda n: any(s in self._text(ids[: n + 1]) for s in stop))
            + 1
        )
        text = self._text(ids[:count])
        spans = [VersionSpan(s.version, s.start, min(s.end, count)) for s in completion.spans if s.start < count]
        cut = dataclasses.replace(
            completion,
            response_ids=ids[:count],
            logprobs=completion.logprobs[:count],
            finish_reason="stop",
            spans=spans,
        )
        return cut, text[: min(at for string in stop if (at := text.find(string)) >= 0)]

    def _answer(self, completion: Completion, text: str, prompt_tokens: int, with_tools: bool) -> Answer:
        content, calls = _parsed(text) if with_tools else (text, [])
        reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
        pieces = [self._tokenizer.decode([i]) for i in completion.response_ids]
        return Answer(
            id=secrets.token_hex(8),
            created=int(time.time()),
            content=content,
            tool_calls=calls,
            finish_reason=reason,
            tokens=list(zip(pieces, completion.logprobs, strict=True)),
            prompt_tokens=prompt_tokens,
        )

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _parsed(text: str) -> tuple[str, list[tuple[str, str]]]:
    """What stands outside of the tool calls, and the calls; if one of them is broken, all is plain text."""
    content, calls = parse_calls(text)
    if not calls or any(call.error for call in calls):
        return text, []
    return content, [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
