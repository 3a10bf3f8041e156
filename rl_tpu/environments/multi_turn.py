"""Several turns with any function that answers the policy: a user, a game, a critic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rl_tpu.environments.calling import call
from rl_tpu.environments.conversation import Conversation, Progress, Reply, require_positive
from rl_tpu.registry import check_options, lookup


class MultiTurn(Conversation):
    """After every turn ``reply(messages, prompt, **reply_options)`` is called with the conversation so far.

    It returns None to end it, a message, a list of them, a text (a message of the user), or a `Reply`, which also gives the
    policy's turn a reward. It may be a coroutine function; a plain function runs in a thread.

    Args:
        reply: its import path ``package.module:function``.
        reply_options: its keyword arguments.
        reply_timeout_s: of one call; a call that takes longer has failed.
        max_turns, max_turn_tokens, timeout_s, reward_text, on_error, template: see `Conversation`.
    """

    def __init__(
        self,
        tokenizer: Any,
        reply: str,
        *,
        reply_options: Mapping[str, Any] | None = None,
        reply_timeout_s: float = 30.0,
        **common: Any,
    ) -> None:
        super().__init__(tokenizer, **common)
        require_positive(reply_timeout_s=reply_timeout_s)
        function = lookup("environment.options.reply", reply, {})
        options = dict(reply_options or {})
        check_options("environment.options.reply", reply, function, ("messages", "prompt"), options)
        self._reply = partial(function, **options)
        self._name = reply
        self._timeout_s = reply_timeout_s

    async def respond(self, progress: Progress) -> Reply:
        messages = progress.transcript.conversation(self.chat)
        return self._as_reply(await call(self._reply, messages, progress.prompt, timeout_s=self._timeout_s))

    def _as_reply(self, answer: Any) -> Reply:
        if isinstance(answer, Reply):
            reply = answer
        elif answer is None:
            reply = Reply(done=True)
        elif isinstance(answer, str):
            reply = Reply([{"role": "user", "content": answer}])
        else:
            reply = Reply([answer] if isinstance(answer, dict) else answer)
        if not (isinstance(reply.messages, list | tuple) and all(map(_is_message, reply.messages))):
            raise TypeError(
                f"{self._name} returned {answer!r}; it returns None, a text, a message"
                " {'role': ..., 'content': ...}, a list of messages, or a rl_tpu.environments.Reply"
            )
        return reply


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
