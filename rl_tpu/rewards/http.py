"""Requests from reward workers to services: several at once, tried again after what passes by itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import aiohttp
from pydantic import AfterValidator, Field

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
SHOWN_CHARACTERS = 300

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]


def _is_set(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError(f"the environment variable {name} is not set")
    return name


KeyVariable = Annotated[str, AfterValidator(_is_set)]
"""Name of an environment variable with a secret, sent as a bearer token. Keys do not belong into configurations."""


class ServiceError(Exception):
    """A service that did not answer as it should, after all attempts. The message says what it said last."""


async def post_all(
    url: str,
    bodies: list[Any],
    *,
    key_variable: str | None,
    attempts: int,
    request_timeout_s: float,
    concurrency: int,
) -> list[Any | ServiceError]:
    """The JSON replies to JSON ``bodies``, in their order; a `ServiceError` in place of a reply that did not come.

    Connections that fail, requests past ``request_timeout_s`` and the statuses of an overloaded server are tried again,
    waiting 0.5, 1, 2, ... seconds (with jitter), or as long as the server asks; other statuses are final.
    """
    headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else {}
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=request_timeout_s)
    serialize = partial(json.dumps, default=str)  # a Parquet row holds dates and decimals
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, trust_env=True, json_serialize=serialize
    ) as session:

        async def post(body: Any) -> Any | ServiceError:
            for attempt in range(1, attempts + 1):
                wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)
                try:
                    async with gate, session.post(url, json=body) as reply:
                        if reply.ok:
                            return await reply.json(content_type=None)
                        said = f"status {reply.status}: {(await reply.text())[:SHOWN_CHARACTERS]}"
                        if reply.status not in RETRIED:
                            return ServiceError(f"{url} answered with {said}")
                        wait_s = max(wait_s, min(LONGEST_WAIT_S, _asked_wait_s(reply.headers)))
                except TimeoutError:
                    said = f"no reply within {request_timeout_s:g} s"
                except (aiohttp.ClientError, ValueError, RecursionError) as error:
                    said = f"{type(error).__name__}: {error}"
                if attempt < attempts:
                    await asyncio.sleep(wait_s)
            return ServiceError(f"{url} failed {attempts} times, last with {said}")

        return await asyncio.gather(*(post(body) for body in bodies))


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    try:
        return float(headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0
