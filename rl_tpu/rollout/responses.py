"""SGLang's generation requests and answers, as of 0.5.23. Pure: no network, no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl_tpu.errors import RunError
from rl_tpu.rollout.engine import WeightUpdate
from rl_tpu.types import Completion, SamplingParams, VersionSpan


def request_body(prompt_ids: Sequence[int], params: SamplingParams, n: int) -> dict[str, Any]:
    """Body of ``/generate`` for n samples of one prompt, with log-probabilities of the sampled tokens."""
    sampling = {
        "max_new_tokens": params.max_response_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
    }
    seeds = [{} if params.seed is None else {"sampling_seed": params.seed + i} for i in range(n)]
    return {
        "input_ids": [list(prompt_ids)] * n,
        "sampling_params": [{**sampling, **seed} for seed in seeds],
        "return_logprob": True,
    }


def parse_completion(item: dict[str, Any]) -> Completion:
    """One element of the answer of ``/generate``."""
    meta = item["meta_info"]
    return Completion(
        response_ids=item["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        finish_reason=meta["finish_reason"]["type"],
        spans=[VersionSpan(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]],
        cached_prompt_tokens=meta["cached_tokens"],
    )


def parse_json(engine: str, path: str, status: int, text: str) -> Any:
    """The body of an answer. Raises RunError with the engine's own message where it says no."""
    try:
        answer = json.loads(text) if text else None
    except ValueError:
        answer = None
    if status != 200:
        message = text
        if isinstance(answer, dict):
            message = answer.get("message") or answer.get("error", text)
        if isinstance(message, dict):
            message = message.get("message", text)
        raise RunError(f"{engine} refused {path}: {message or f'HTTP status {status}'}")
    return answer


def parse_update(answer: dict[str, Any], version: int, seconds: float, pause_seconds: float) -> WeightUpdate:
    """The report `weight_loader` put into the answer's message; SGLang appends words of its own."""
    report, _ = json.JSONDecoder().raw_decode(answer["message"])
    return WeightUpdate(
        version=version,
        seconds=seconds,
        pause_seconds=pause_seconds,
        verify_seconds=report["verify_seconds"],
        tensors=report["tensors"],
        bytes=report["bytes"],
    )
