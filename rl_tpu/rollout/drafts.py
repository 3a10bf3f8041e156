"""A sample while it is being written, by one engine or by several after each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rl_tpu.types import Completion, SamplingParams, VersionSpan

ABORT = "abort"
"""The finish reason of what an engine gave up without having lost it."""


@dataclass
class Draft:
    """What there is of a sample. ``params`` are the whole sample's; ``on_finish`` is called once, when it is whole."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    on_finish: Callable[[], None] = lambda: None
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    """Empty while it is not whole."""
    cached_prompt_tokens: int = 0
    """Of the prompt, found in the cache of the engine that began the sample."""
    _earlier: list[VersionSpan] = field(default_factory=list)
    """Of tokens from before the present request."""
    _spans: list[VersionSpan] = field(default_factory=list)
    """Of the present request's tokens, counted from its first."""

    @property
    def finished(self) -> bool:
        return self.finish_reason not in ("", ABORT)

    @property
    def spans(self) -> list[VersionSpan]:
        """Without gaps, no two after each other of one version."""
        return _joined(self._earlier, self._spans)

    def begin(self) -> None:
        """A new request will go on where the last one ended."""
        self._earlier, self._spans = self.spans, []
        self.finish_reason = ""
        if len(self.response_ids) >= self.params.max_response_tokens:  # it ended with the request's last token
            self.finish("length")

    def restart(self) -> None:
        """Forget what was written."""
        self.response_ids, self.logprobs, self._earlier, self._spans = [], [], [], []
        self.finish_reason, self.cached_prompt_tokens = "", 0

    def request(self) -> tuple[list[int], SamplingParams]:
        """The tokens to continue, and how."""
        left = self.params.max_response_tokens - len(self.response_ids)
        return [*self.prompt_ids, *self.response_ids], replace(self.params, max_response_tokens=left)

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[VersionSpan]) -> None:
        """More tokens; ``spans`` are those of all tokens of the present request."""
        self.response_ids += ids
        self.logprobs += logprobs
        self._spans = list(spans)

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self.finished:
            self.on_finish()

    def completion(self) -> Completion:
        return Completion(self.response_ids, self.logprobs, self.finish_reason, self.spans, self.cached_prompt_tokens)


def make_drafts(prompt_ids: Sequence[int], params: SamplingParams, n: int) -> list[Draft]:
    """``n`` samples of a prompt. Sample i is drawn with seed ``params.seed + i``."""
    seeds = [None if params.seed is None else params.seed + i for i in range(n)]
    return [Draft(prompt_ids, replace(params, seed=seed)) for seed in seeds]


def _joined(earlier: Sequence[VersionSpan], later: Sequence[VersionSpan]) -> list[VersionSpan]:
    offset = earlier[-1].end if earlier else 0
    spans = list(earlier)
    for span in later:
        start, end = span.start + offset, span.end + offset
        if end == start:
            continue
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(VersionSpan(span.version, start, end))
    return spans
