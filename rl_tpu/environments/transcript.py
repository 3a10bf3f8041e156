"""Writing down one sample as it grows: what the policy sampled and what an environment put in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_tpu.types import Completion, Prompt, Sample, SamplingParams, Turn, VersionSpan

_LAST_TURN = "@@the policy's last turn@@"


class Transcript:
    """The tokens of one sample so far. Sampled ids stay as sampled: text is decoded from them, never encoded again."""

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

    @property
    def ids(self) -> list[int]:
        """Prompt and response so far: what the policy continues."""
        return self._sample.prompt_ids + self._sample.response_ids

    @property
    def response_tokens(self) -> int:
        return len(self._sample.response_ids)

    def add_completion(self, completion: Completion) -> None:
        """What the policy wrote: the loss learns from it."""
        offset = self.response_tokens
        self._sample.response_ids += completion.response_ids
        self._sample.logprobs += completion.logprobs
        self._sample.loss_mask += [1] * len(completion.response_ids)
        self._sample.spans += [VersionSpan(s.version, s.start + offset, s.end + offset) for s in completion.spans]
        self._sample.turns.append(Turn(offset, self.response_tokens))
        self._sample.finish_reason = completion.finish_reason

    def add_environment_ids(self, ids: Sequence[int]) -> None:
        """What the environment wrote: read by the policy, masked out of the loss."""
        self._sample.response_ids += ids
        self._sample.logprobs += [0.0] * len(ids)
        self._sample.loss_mask += [0] * len(ids)

    def message_ids(self, tokenizer: Any, content: str, role: str = "user") -> list[int]:
        """A message after the policy's last turn, as token ids: they end that turn and open the policy's next one.

        The chat template says what stands between two turns. What the policy sampled already, its end token, is left
        out; nothing that it sampled is rendered. Not yet added: the caller knows whether there is room.
        """
        turns = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _LAST_TURN},
            {"role": role, "content": content},
        ]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered.partition(_LAST_TURN)[2], add_special_tokens=False)["input_ids"]
        return ids[1:] if ids[:1] == self._sample.response_ids[-1:] else ids

    def remaining(self, params: SamplingParams) -> SamplingParams:
        """``params`` for the next turn: the response's token budget less what is used up."""
        return replace(params, max_response_tokens=params.max_response_tokens - self.response_tokens)

    def finish(self, tokenizer: Any, text_ids: Sequence[int] | None = None) -> Sample:
        """The sample, with the text that rewards read: of the whole response, or of ``text_ids`` alone."""
        ids = self._sample.response_ids if text_ids is None else text_ids
        self._sample.text = tokenizer.decode(ids, skip_special_tokens=True)
        return self._sample
