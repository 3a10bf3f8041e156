"""Writing answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Count, Positive, Seconds, Section


class RolloutConfig(Section):
    """Writing answers: the engines and how they sample."""

    prompts_per_step: Positive
    """Prompts (groups) in one step's batch."""
    samples_per_prompt: Positive
    """Answers per prompt, compared with each other where the algorithm has a baseline of the group's."""
    max_response_tokens: Positive
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Log-probabilities, the trainer's too, are those of the truncated distribution."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens; -1 for all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample among the tokens that are at least this share as likely as the likeliest; 0 for all."""
    stop_token_ids: list[Count] = Field(default_factory=list)
    """Tokens that end an answer, besides the model's own end tokens."""
    max_staleness: Count = 0
    """How many policy versions a batch may lag behind the policy that trains on it. 0: generate, then train; 1: one step
    off; k: asynchronous with a bound."""
    stale_groups: Literal["wait", "drop", "correct"] = "wait"
    """What keeps old groups within max_staleness. A batch waits for a group that could not train later (`wait`: nothing is
    lost, a long answer can hold a step), a group that is too old when a batch is made is dropped (`drop`: short answers
    are favoured), or trains all the same, weighed by algorithm.correction (`correct`)."""
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Groups in flight for each one that max_staleness still lets be drawn. A step starts when the first prompts_per_step
    groups are ready; the others, often half written, go on under the next policy. More than 1 makes up for what is dropped
    or comes late: it needs max_staleness of at least 1, and stale_groups drop or correct."""
    engines: Positive = 1
    """SGLang servers."""
    tensor_parallel: Positive = 1
    """Devices per engine."""
    context_tokens: Positive = 4096
    """Longest prompt plus answer an engine accepts."""
    max_running_requests: Positive = 256
    """Samples an engine decodes at the same time."""
    kv_cache_tokens: Positive | None = None
    """Tokens the key-value cache holds; null lets the engine fill its memory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights."""
    threads_per_engine: Positive = 1
    """CPU threads of one engine process (on a CPU, more is slower for small models)."""
    start_timeout_s: Seconds = 300.0
    """Deadline for an engine to answer its health check."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one generation request."""
    server_options: dict[str, Any] = Field(default_factory=dict)
    """Further SGLang server arguments, by their names with underscores."""
