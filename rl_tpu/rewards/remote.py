"""A reward behind HTTP: a verifier, a sandbox or a reward model that runs elsewhere."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field

from rl_tpu.rewards.http import KeyVariable, ServiceError, Url, post_all
from rl_tpu.rewards.registry import Response, takes_group
from rl_tpu.types import Prompt


@takes_group
def score(
    responses: list[Response],
    answer: Any,
    prompt: Prompt,
    *,
    url: Url,
    batch_size: Annotated[int, Field(ge=1)] | None = None,
    key_variable: KeyVariable | None = None,
    attempts: Annotated[int, Field(ge=1)] = 4,
    request_timeout_s: Annotated[float, Field(gt=0)] = 20.0,
    concurrency: Annotated[int, Field(ge=1)] = 8,
) -> list:
    """What a service says of the responses to a prompt, all in one request, or ``batch_size`` in each.

    POST to ``url``: ``{"prompt": {id, messages, answer, metadata, source}, "responses": [{text, tokens, finish_reason}]}``.
    Reply: ``{"rewards": [...]}`` with a number, named parts or null (could not be scored: counted as an error) for each.
    """
    about = {
        "id": prompt.id,
        "messages": list(prompt.messages),
        "answer": answer,
        "metadata": prompt.metadata,
        "source": prompt.source,
    }
    size = batch_size or len(responses)
    batches = [responses[start : start + size] for start in range(0, len(responses), size)]
    bodies = [{"prompt": about, "responses": [vars(response) for response in batch]} for batch in batches]
    replies = asyncio.run(
        post_all(
            url,
            bodies,
            key_variable=key_variable,
            attempts=attempts,
            request_timeout_s=request_timeout_s,
            concurrency=concurrency,
        )
    )
    return [
        reward for batch, reply in zip(batches, replies, strict=True) for reward in _rewards(reply, len(batch), url)
    ]


def _rewards(reply: Any, count: int, url: str) -> list:
    if isinstance(reply, ServiceError):
        return [reply] * count
    rewards = reply.get("rewards") if isinstance(reply, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        return [ServiceError(f"{url} did not reply with {{'rewards': [{count} entries]}}: {reply!r:.300}")] * count
    return [ServiceError(f"{url} could not score it") if reward is None else reward for reward in rewards]
