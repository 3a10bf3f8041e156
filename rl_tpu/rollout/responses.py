"""SGLang's requests and answers, as of 0.5.23."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.drafts import Draft
from rl_tpu.types import SUPPORT_TOKENS, SamplingParams, VersionSpan

STREAM_TOKENS = 64
"""An engine sends what it wrote every so many tokens: so many of a sample are lost at most where it is killed. Samples that
can't be longer come together once the last has ended, which costs less time."""


def request_body(drafts: Sequence[Draft], vocabulary: int, seeded: bool) -> dict[str, Any]:
    """Body of ``/generate`` to go on with samples, with the log-probabilities of the sampled tokens.

    SGLang's ordinary log-probabilities are those of the whole distribution at the request's temperature (1 if greedy).
    Where top_p, top_k or min_p truncate it they are not those of the distribution that was sampled from, so these are
    asked for as well; the truncation is then taken among the ``SUPPORT_TOKENS`` likeliest tokens.

    Raises UserError for what SGLang does not check and its scheduler would die of: a token id outside of the vocabulary
    (on a CPU), and min_p where sampling is ``seeded``. An engine without seeded sampling ignores seeds.
    """
    asked = [draft.request() for draft in drafts]
    for prompt_ids, params in asked:
        if seeded and params.min_p > 0:
            raise UserError(
                "SGLang has no min_p in seeded sampling: leave min_p at 0, or set"
                " rollout.server_options.enable_deterministic_inference to false"
            )
        if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
            where = f"a token id outside of the model's vocabulary of {vocabulary}" if prompt_ids else "no token"
            raise UserError(f"a prompt of {len(prompt_ids)} tokens has {where}; is the tokenizer the model's own?")
    truncated = any(is_truncated(params) for _, params in asked)
    return {
        "input_ids": [prompt_ids for prompt_ids, _ in asked],
        "sampling_params": [_sampling(params, vocabulary) for _, params in asked],
        "return_logprob": True,
        "stream": any(params.max_response_tokens > STREAM_TOKENS for _, params in asked),
        **({"return_sampling_mask": True} if truncated else {}),
    }


def _sampling(params: SamplingParams, vocabulary: int) -> dict[str, Any]:
    top_k = params.top_k
    if is_truncated(params):
        support = min(vocabulary, SUPPORT_TOKENS)
        top_k = params.top_k if 0 < params.top_k < support else support
    return {
        "max_new_tokens": params.max_response_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": top_k,
        "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
        "stream_interval": STREAM_TOKENS,
        **({} if params.seed is None else {"sampling_seed": params.seed}),
    }


def is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The elements of a streamed answer (server-sent events), or those of a list that comes whole."""
    if response.content_type == "application/json":
        for index, sample in enumerate(orjson.loads(await response.read())):
            yield {**sample, "index": index}
        return
    pending = b""
    async for received in response.content.iter_any():
        *whole, pending = (pending + received).split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data: ")
            if text != b"[DONE]":
                yield orjson.loads(text)


def read_event(event: dict[str, Any], draft: Draft, received: int) -> int:
    """Add one element of a streamed answer to its sample; how many tokens of the request are now ``received``.

    What it brings of a sample that was aborted while it waited may have been sent before: SGLang counts the tokens.
    """
    meta = event["meta_info"]
    logprobs = meta.get("output_token_sampling_logprobs")
    if logprobs is None:
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    new = meta["completion_tokens"] - received
    spans = [VersionSpan(int(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions", ())]
    if received == 0 and not draft.response_ids:
        draft.cached_prompt_tokens = meta.get("cached_tokens", 0)
    if new > 0:
        draft.extend(event["output_ids"][:new], logprobs[:new], spans)
    if reason := meta["finish_reason"]:
        draft.finish(reason["type"])
    return received + max(0, new)


def parse_json(engine: str, path: str, status: int, text: str) -> Any:
    """The body of an answer. Raises RunError with SGLang's own message where it says no."""
    try:
        answer = json.loads(text) if text else None
    except ValueError:
        answer = None
    if status == 200:
        return answer
    message = text or f"HTTP status {status}"
    if isinstance(answer, dict):
        said = answer.get("message") or answer.get("error") or message
        message = said.get("message", message) if isinstance(said, dict) else said
    raise RunError(f"{engine} refused {path}: {message}")
