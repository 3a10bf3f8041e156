"""The records that travel between the rooms of the house. Plain data: no Ray, no engine, no model.

Tokens in, tokens out: ids that the engine sampled are never decoded and encoded again on their way to the trainer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reward workers unpickle these records and should not pay for importing torch
    import torch

IGNORE_INDEX = -100
"""Label of a position that predicts nothing (last token of a sample, padding)."""
SUPPORT_TOKENS = 4096
"""A truncated distribution has at most so many tokens: for no more SGLang reports a token's probability within it."""


@dataclass(frozen=True)
class Prompt:
    """One problem, already rendered and tokenized.

    ``id`` is stable over runs (source and position), ``ids`` are the prompt's token ids (generation prompt included),
    ``answer`` is whatever the reward compares with, ``messages`` the chat turns the ids were rendered from,
    ``metadata`` the other fields of the row (for rewards and dumps), ``source`` the name of its source in a mixture or of its
    evaluation set, ``sampling`` those `SamplingParams` that the row sets for itself.
    """

    id: str
    ids: tuple[int, ...]
    answer: Any
    messages: tuple[dict[str, str], ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How the engine draws tokens. ``top_k`` -1 and ``top_p`` 1 leave the distribution whole; temperature 0: greedy."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``start:end`` (end exclusive) were sampled under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """What an engine returned for one sample of one request.

    ``response_ids`` and ``logprobs`` have equal length; a log-probability is taken under the distribution the token was
    sampled from. ``finish_reason`` is ``stop`` (an end token, included in the ids), ``length`` or ``abort``.
    """

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[VersionSpan]
    cached_prompt_tokens: int = 0


@dataclass
class Turn:
    """Response tokens ``start:end`` (end exclusive) are one turn of the policy; ``reward`` is what the environment gave
    for it. With algorithm.credit=turn it has an advantage of its own."""

    start: int
    end: int
    reward: float = 0.0
    advantage: float = 0.0


@dataclass
class Sample:
    """One answer to a prompt, as the trainer learns from it.

    ``response_ids``, ``loss_mask`` and ``logprobs`` have equal length. ``loss_mask`` is 1 where the policy wrote the
    token and 0 where an environment did. ``reward_parts`` are the named terms that add up to ``reward``; the rewards of
    ``turns`` are one of them, ``environment``.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    text: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str | None = None
    """Why the reward could not be computed (time-out, exception, crash); the reward is then the configured one."""
    advantage: float = 0.0
    cached_prompt_tokens: int = 0
    """Of the prompt, which the engine had read before and did not compute again."""
    turns: list[Turn] = field(default_factory=list)
    """In order; together they are the tokens that the policy wrote."""
    measures: dict[str, float] = field(default_factory=dict)
    """What the environment counted, by name: their means over the samples that have them are metrics `environment/NAME`."""
    id: str = ""
    """Of a training sample: its group's index and its number in the group, unique in a run."""

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.spans)

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Group:
    """All samples of one prompt. ``index`` counts the groups of a run in the order their prompts were drawn."""

    index: int
    prompt: Prompt
    samples: list[Sample]

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples]


@dataclass
class PackedBatch:
    """Samples laid side by side in rows of one length L, R rows in all. Position t predicts token t+1.

    A row holds segments. A segment is a whole sample, or with shared prompts either a prompt without its last token, or
    that last token and one answer: an answer's tokens then see their own segment and the one named by prefix_ids.

    input_ids           [R, L] int64    tokens; padding is a trailing segment of its own
    positions           [R, L] int64    place of the token in its sample, from 0
    segment_ids         [R, L] int64    1, 2, ... per segment of the row, 0 for padding
    prefix_ids          [R, L] int64    the segment of the same row that the token sees besides its own, 0 for none
    sample_ids          [R, L] int64    1 + index of the token's sample in the packed list, 0 for padding and shared prompts
    labels              [R, L] int64    the next token of the same sample, else IGNORE_INDEX
    loss_mask           [R, L] float32  1 where the predicted token was written by the policy
    sampler_logprobs    [R, L] float32  the engine's log-probability of the predicted token (0 where masked)
    old_logprobs        [R, L] float32  what the ratio compares with: the engine's, or the trainer's before the update
    advantages          [R, L] float32  of the predicted token (0 where masked)
    reference_logprobs  [R, L] float32  of the reference policy, where there is one
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    segment_ids: torch.Tensor
    prefix_ids: torch.Tensor
    sample_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def row_tokens(self) -> int:
        return self.input_ids.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def select(self, rows: slice | list[int]) -> PackedBatch:
        """The given rows as a batch of their own."""
        return PackedBatch(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device."""
        return PackedBatch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})
