"""Writing down one sample as it grows: what the policy sampled and what an environment put in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_tpu.environments.chat import Chat, Message
from rl_tpu.types import Completion, Prompt, Sample, SamplingParams, Turn, VersionSpan


@dataclass(frozen=True)
class Rendered:
    """Messages as the policy will read them. ``ids`` end its last turn, as far as it did not do so itself, say
    ``messages`` and open its next turn; ``text`` is what was encoded to them."""

    ids: list[int]
    text: str
    messages: list[Message]


class Transcript:
    """The tokens of one sample so far. Sampled ids stay as sampled: text is decoded from them, never encoded again.

    Plain data: a deep copy is a branch of the conversation.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._sample = Sample(
            prompt_ids=list(prompt.ids),
            response_ids=[],
            loss_mask=[],
            logprobs=[],
            spans=[],
            finish_reason="",
        )
        self._between: dict[int, Rendered | None] = {}
        """What follows the policy's turns, by the number of turns before it; None where only its ids are known."""
        self._texts: dict[int, str] = {}
        """Of turns, by index: decoded once."""

    @property
    def ids(self) -> list[int]:
        """Prompt and response so far: what the policy continues."""
        return self._sample.prompt_ids + self._sample.response_ids

    @property
    def response_tokens(self) -> int:
        return len(self._sample.response_ids)

    @property
    def environment_tokens(self) -> int:
        """Those of the response that the policy did not write."""
        return self.response_tokens - sum(self._sample.loss_mask)

    @property
    def turns(self) -> list[Turn]:
        """Of the policy."""
        return self._sample.turns

    def add_completion(self, completion: Completion) -> None:
        """What the policy wrote: the loss learns from it."""
        offset = self.response_tokens
        if not self.turns:
            self._sample.cached_prompt_tokens = completion.cached_prompt_tokens
        self._sample.response_ids += completion.response_ids
        self._sample.logprobs += completion.logprobs
        self._sample.loss_mask += [1] * len(completion.response_ids)
        self._sample.spans += [VersionSpan(s.version, s.start + offset, s.end + offset) for s in completion.spans]
        self._sample.turns.append(Turn(offset, self.response_tokens))
        self._sample.finish_reason = completion.finish_reason

    def render(self, chat: Chat, messages: Sequence[Message]) -> Rendered:
        """Messages after the policy's last turn. Not yet added: the caller knows whether there is room.

        The end token that the policy sampled is left out of them; a turn that was cut off, or stopped at another token,
        is ended by the environment. Raises UserError where the template refuses the messages.
        """
        text, ids = chat.after_turn(messages)
        last = self._sample.response_ids[-1:]
        if last and last[0] in ids:
            until = ids.index(last[0]) + 1
            if not chat.tokenizer.decode(ids[: until - 1]).strip():  # else it is a token of the messages
                text, ids = text.removeprefix(chat.tokenizer.decode(ids[:until])), ids[until:]
        return Rendered(ids, text, list(messages))

    def add_messages(self, rendered: Rendered) -> None:
        """What the environment says, once after a turn: read by the policy, masked out of the loss."""
        self.add_environment_ids(rendered.ids)
        self._between[len(self.turns)] = rendered

    def add_environment_ids(self, ids: Sequence[int]) -> None:
        """Likewise, where no messages belong to the ids."""
        self._sample.response_ids += ids
        self._sample.logprobs += [0.0] * len(ids)
        self._sample.loss_mask += [0] * len(ids)
        self._between[len(self.turns)] = None

    def remaining(self, params: SamplingParams) -> SamplingParams:
        """``params`` for the next turn: the response's token budget less what is used up."""
        return replace(params, max_response_tokens=params.max_response_tokens - self.response_tokens)

    def turn_text(self, chat: Chat, turn: int = -1) -> str:
        """What the policy wrote in a turn: special tokens are kept, the one that ends the turn is not."""
        index = turn % len(self.turns)
        if index not in self._texts:
            ids, ended = self._turn_ids(self.turns[index]), self._ended(chat, index)
            self._texts[index] = chat.tokenizer.decode(ids[:-1] if ended else ids)
        return self._texts[index]

    def conversation(self, chat: Chat, turns: int | None = None) -> list[Message]:
        """The prompt's messages and all that followed, turns of the policy as text; or only as far as the policy had read
        before it wrote its turn number ``turns`` (from 0)."""
        messages: list[Message] = [dict(message) for message in self._prompt.messages]
        for index in range(len(self.turns) if turns is None else turns):
            messages.append({"role": "assistant", "content": self.turn_text(chat, index)})
            if rendered := self._between.get(index + 1):
                messages += rendered.messages
        return messages

    def pieces(self, chat: Chat) -> list[tuple[str, str]] | None:
        """What the policy had read before its last turn, piece by piece: a name and the text that it holds.

        None where not all of it came from messages.
        """
        if not self._prompt.messages or None in self._between.values() or 0 in self._between:
            return None
        pieces = [("the prompt", chat.render(self._prompt.messages, generation_prompt=True))]
        for number, turn in enumerate(self.turns[:-1], start=1):
            end = chat.tokenizer.decode(self._turn_ids(turn)[-1:]) if self._ended(chat, number - 1) else ""
            pieces.append((f"turn {number} of the policy", self.turn_text(chat, number - 1) + end))
            if rendered := self._between.get(number):
                pieces.append((f"what follows turn {number}", rendered.text))
        return pieces

    def finish(self, tokenizer: Any, text_ids: Sequence[int] | None = None, finish_reason: str | None = None) -> Sample:
        """The sample, with the text that rewards read: of the whole response, or of ``text_ids`` alone. It ended as its
        last turn did, or for another reason."""
        ids = self._sample.response_ids if text_ids is None else text_ids
        self._sample.text = tokenizer.decode(ids, skip_special_tokens=True)
        self._sample.finish_reason = finish_reason or self._sample.finish_reason
        return self._sample

    def last_turn_ids(self) -> list[int]:
        return self._turn_ids(self.turns[-1])

    def _ended(self, chat: Chat, index: int) -> bool:
        """Whether the policy ended that turn itself."""
        return any(last in chat.end_ids for last in self._turn_ids(self.turns[index])[-1:])

    def _turn_ids(self, turn: Turn) -> list[int]:
        return self._sample.response_ids[turn.start : turn.end]
