"""What a chat template writes: whole conversations, and what stands between two turns of the policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from rl_tpu.errors import UserError
from rl_tpu.registry import one_line

Message = dict[str, Any]
"""``role``, ``content`` and whatever else the template reads, as in OpenAI's API."""

REMEMBERED = 256
"""So many renderings between turns are kept: environments say the same again and again."""
_LAST_TURN = "@@the last turn@@"


class Chat:
    """A tokenizer's chat template with fixed options, for example ``tools`` or ``enable_thinking``."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._remembered = lru_cache(REMEMBERED)(self._after_turn)

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises UserError where the template refuses it, for example an unknown role."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self._options
            )
        except Exception as error:  # templates raise whatever their authors chose
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(f"the chat template refuses messages with the roles {roles}: {one_line(error)}") from error

    def after_turn(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Text and ids that end a turn of the policy, say ``messages`` and open the policy's next turn.

        All messages are rendered together, because templates merge neighbours (Qwen puts the answers of several tools
        into one turn). Neither the prompt nor what the policy wrote is rendered: it costs the same in a long conversation.
        Raises UserError as `render` does, and where the template leaves out the policy's turn.
        """
        text, ids = self._remembered(json.dumps(list(messages)))
        return text, list(ids)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The token with which the template ends a turn of the policy, and the tokenizer's end token."""
        _, _, after = self._split([{"role": "user", "content": "-"}], generation_prompt=False)
        ids = self._encode(after)
        first = next((i for i in ids if self.tokenizer.decode([i]).strip()), None)
        ends = {self.tokenizer.eos_token_id, first if first in self.tokenizer.all_special_ids else None}
        return frozenset(ends - {None})

    def defused(self, text: str) -> str:
        """The text with a space in every special token of the tokenizer, which would begin or end turns where it is read."""
        return self._special.sub(lambda match: " ".join(_halves(match[0])), text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        tokens = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _after_turn(self, messages: str) -> tuple[str, tuple[int, ...]]:
        _, found, after = self._split(json.loads(messages), generation_prompt=True)
        if not found:
            raise UserError("the chat template leaves out a turn of the assistant; it cannot carry several turns")
        return after, tuple(self._encode(after))

    def _split(self, messages: Sequence[Message], generation_prompt: bool) -> tuple[str, str, str]:
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _LAST_TURN}, *messages]
        return self.render(turns, generation_prompt).partition(_LAST_TURN)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
