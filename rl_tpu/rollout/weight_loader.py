"""How an engine takes a new policy from weight_sync: SGLang's ``--custom-weight-loader``, run in its scheduler processes.

The update request carries no weights, only the sender's handle. Every tensor-parallel rank receives the tensors itself
and verifies them; when all ranks have, SGLang's own ``load_weights`` copies them into the model (it knows how q, k and v
or gate and up are fused and how weights are split over ranks).
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from weight_sync import Received, Receiver, open_receiver

LOADER = "rl_tpu.rollout.weight_loader.load"
"""Import path of `load`, as SGLang's arguments and requests name it."""

T = TypeVar("T")


class WeightLoadError(Exception):
    """A version was not taken over; the message says why and what the engine holds now."""


def encode_request(handle: Mapping[str, Any], transport: str, verify: bool) -> str:
    """The request's payload: SGLang wants pickled (name, tensor) pairs, so the handle's JSON travels as bytes of one."""
    text = json.dumps({"handle": dict(handle), "transport": transport, "verify": verify})
    pairs = [("handle", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
    return base64.b64encode(pickle.dumps(pairs)).decode()


_receivers: dict[tuple[str, bool], Receiver] = {}
_covered: set[tuple] = set()
_report: dict[str, float] = {}


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Take over the version that the request's handle describes. Raises WeightLoadError on all ranks or on none."""
    request = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    start = time.perf_counter()
    received = _on_all_ranks(lambda: _receive(model, request), "nothing was loaded")
    verified = time.perf_counter()

    def copy() -> None:
        with received:
            model.load_weights(iter(received.tensors.items()))

    _on_all_ranks(copy, "its weights are a mixture now")
    _report.update(
        tensors=len(received.manifest.tensors),
        bytes=sum(entry.nbytes for entry in received.manifest.tensors),
        verify_seconds=verified - start,
        load_seconds=time.perf_counter() - verified,
    )


def _receive(model: torch.nn.Module, request: dict[str, Any]) -> Received:
    from rl_tpu.rollout.coverage import check_coverage, check_tied

    key = request["transport"], request["verify"]
    if key not in _receivers:
        _receivers[key] = open_receiver(request["transport"], verify=request["verify"])
    received = _receivers[key].receive(request["handle"])
    layout = tuple((entry.name, entry.shape) for entry in received.manifest.tensors)
    if layout not in _covered:
        check_coverage(model, received.manifest)
        _covered.add(layout)
    check_tied(model, received.tensors)
    return received


def _on_all_ranks(work: Callable[[], T], state: str) -> T:
    """Do the work on every tensor-parallel rank; if it failed on any, fail on all."""
    from sglang.srt.runtime_context import get_parallel

    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = f"{caught} ({type(caught).__name__}; {state})"
    parallel = get_parallel()
    errors = [error] * parallel.tp_size
    if parallel.tp_size > 1:
        torch.distributed.all_gather_object(errors, error, group=parallel.tp_group.cpu_group)
    for rank, said in enumerate(errors):
        if said is not None:
            raise WeightLoadError(f"rank {rank}: {said}" if parallel.tp_size > 1 else said)
    return result


def register_hook() -> None:
    """Let `load` answer with a message. SGLang 0.5.23 lets a loader's error end its scheduler and drops its result."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.update_weights_from_tensor", _answer, HookType.AROUND)


def _answer(update: Callable[..., tuple[bool, str]], *args: Any, **options: Any) -> tuple[bool, str]:
    try:
        success, message = update(*args, **options)
    except WeightLoadError as error:
        return False, str(error)
    return success, json.dumps(_report) if options.get("load_format") == LOADER else message
