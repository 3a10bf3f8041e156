"""SGLang's requests and answers, as of 0.5.23. Pure: no network, no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl_tpu.errors import RunError, UserError
from rl_tpu.types import SUPPORT_TOKENS, Completion, SamplingParams, VersionSpan


def request_body(
    prompt_ids: Sequence[int], params: SamplingParams, n: int, vocabulary: int, seeded: bool
) -> dict[str, Any]:
    """Body of ``/generate`` for n samples of one prompt, with the log-probabilities of the sampled tokens.

    SGLang's ordinary log-probabilities are those of the whole distribution at the request's temperature (1 if greedy).
    Where top_p, top_k or min_p truncate it they are not those of the distribution that was sampled from, so these are
    asked for as well; the truncation is then taken among the ``SUPPORT_TOKENS`` likeliest tokens.

    Sample i is drawn with seed ``params.seed + i``; engines without seeded sampling ignore it.

    Raises UserError for what SGLang does not check and its scheduler would die of: a token id outside of the vocabulary
    (on a CPU), and min_p where sampling is ``seeded``.
    """
    if seeded and params.min_p > 0:
        raise UserError(
            "SGLang has no min_p in seeded sampling: leave min_p at 0, or set"
            " rollout.server_options.enable_deterministic_inference to false"
        )
    if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
        where = f"a token id outside of the model's vocabulary of {vocabulary}" if prompt_ids else "no token"
        raise UserError(f"a prompt of {len(prompt_ids)} tokens has {where}; is the tokenizer the model's own?")
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_response_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
    }
    truncated = is_truncated(params)
    if truncated:
        support = min(vocabulary, SUPPORT_TOKENS)
        sampling["top_k"] = params.top_k if 0 < params.top_k < support else support
    seeds = [{} if params.seed is None else {"sampling_seed": params.seed + i} for i in range(n)]
    return {
        "input_ids": [list(prompt_ids)] * n,
        "sampling_params": [{**sampling, **seed} for seed in seeds],
        "return_logprob": True,
        **({"return_sampling_mask": True} if truncated else {}),
    }


def is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def parse_completion(item: dict[str, Any]) -> Completion:
    """One element of the answer of ``/generate``. Of what was aborted while it waited SGLang tells only a part."""
    meta = item["meta_info"]
    logprobs = meta.get("output_token_sampling_logprobs")
    if logprobs is None:
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    spans = meta.get("weight_versions", ())
    return Completion(
        response_ids=item["output_ids"],
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        spans=[VersionSpan(int(span["version"]), span["start"], span["end"]) for span in spans],
        cached_prompt_tokens=meta.get("cached_tokens", 0),
    )


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
