"""How an engine takes a new policy from weight_sync: our part of SGLang's scheduler processes.

The driver makes three requests, and every tensor-parallel rank runs each of them at the same point of its schedule:

* ``stage``: begin to receive and verify a version, in a thread, while the engine goes on generating;
* ``staged``: whether all ranks have it, or why one does not;
* ``load``: copy what is staged into the model. Only this one needs a pause. SGLang's own ``load_weights`` does it, which
  knows how q, k and v or gate and up are fused and how weights are split over ranks.

None of them carries weights. SGLang 0.5.23 runs one kind of request on all ranks without waiting for running samples to
end: ``/weights_checker``. The first two travel as actions of it, the third as a custom weight loader of
``/update_weights_from_tensor``.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from rl_tpu.rollout.prefix_cache import open_name_space
from weight_sync import Received, Receiver, open_receiver

LOADER = "rl_tpu.rollout.weight_loader.load"
"""Import path of `load`, as SGLang's arguments and requests name it."""
ACTION = "weight_sync "
"""Begins the actions of /weights_checker that are meant for us; JSON follows."""
NOTHING_LOADED = "nothing was loaded"
"""In the message of a refusal: the engine holds what it held."""
MIXTURE = "its weights are a mixture now"
"""In the message of a load that broke off."""
NICENESS = 10
"""Of the staging thread: where cores are few, generating goes first."""

T = TypeVar("T")


class WeightLoadError(Exception):
    """A version was not taken over; the message says why and what the engine holds now."""


def stage_action(handle: Mapping[str, Any], version: int, transport: str, verify: bool) -> str:
    """The action that begins to stage what ``handle`` describes."""
    return ACTION + json.dumps(
        {"stage": version, "handle": dict(handle), "transport": transport, "verify": verify}, separators=(",", ":")
    )


def staged_action(version: int) -> str:
    """The action that asks whether a version is staged."""
    return ACTION + json.dumps({"staged": version})


def load_payload(version: int) -> str:
    """The load request's tensors. SGLang wants pickled (name, tensor) pairs."""
    return base64.b64encode(pickle.dumps([("version", torch.tensor(version))])).decode()


def _step_back() -> None:
    """Lower the priority of this thread and of those it starts (on Linux both have priorities of their own)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Stage:
    """What this process has received of the next version, or is receiving. One version at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weight-staging", initializer=_step_back)
        self._receivers: dict[tuple[str, bool], Receiver] = {}
        self._covered: set[tuple] = set()
        self._version: int | None = None
        self._future: Future[Received] | None = None

    def begin(self, model: torch.nn.Module, request: Mapping[str, Any]) -> None:
        """Start receiving and verifying; what was staged before is dropped."""
        self._version, self._future = request["stage"], self._thread.submit(self._receive, model, request)

    def done(self, version: int) -> bool:
        """Whether receiving has ended, well or not."""
        return self._of(version).done()

    def received(self, version: int) -> Received:
        """What was staged, if it is whole still. Raises what went wrong."""
        future = self._of(version)
        if not future.done():
            raise WeightLoadError(f"version {version} is still being received")
        received = future.result()
        received.check()
        return received

    def clear(self) -> None:
        self._version = self._future = None

    def _of(self, version: int) -> Future[Received]:
        if self._future is None or self._version != version:
            raise WeightLoadError(f"version {version} is not staged")
        return self._future

    def _receive(self, model: torch.nn.Module, request: Mapping[str, Any]) -> Received:
        from rl_tpu.rollout.coverage import check_coverage, check_tied

        key = request["transport"], request["verify"]
        if key not in self._receivers:
            self._receivers[key] = open_receiver(request["transport"], verify=request["verify"])
        received = self._receivers[key].receive(request["handle"])
        layout = tuple((entry.name, entry.shape) for entry in received.manifest.tensors)
        if layout not in self._covered:
            check_coverage(model, received.manifest)
            self._covered.add(layout)
        check_tied(model, received.tensors)
        return received


_stage = Stage()


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy the staged version into the model. Raises WeightLoadError on all ranks or on none."""
    version = int(named_tensors[0][1])
    received = on_all_ranks(lambda: _stage.received(version), NOTHING_LOADED)

    def copy() -> None:
        with received:
            model.load_weights(iter(received.tensors.items()))

    try:
        on_all_ranks(copy, MIXTURE)
    finally:
        _stage.clear()


def _staged(version: int) -> dict[str, Any]:
    """Whether all ranks have received a version, and its size. Raises WeightLoadError on all ranks."""
    if not all(_from_all_ranks(_stage.done(version))):
        return {"staged": False}
    received = on_all_ranks(lambda: _stage.received(version), NOTHING_LOADED)
    entries = received.manifest.tensors
    return {"staged": True, "tensors": len(entries), "bytes": sum(entry.nbytes for entry in entries)}


def on_all_ranks(work: Callable[[], T], state: str) -> T:
    """Do the work on every tensor-parallel rank; if it failed on any, fail on all."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = f"{caught} ({type(caught).__name__}; {state})"
    errors = _from_all_ranks(error)
    for rank, said in enumerate(errors):
        if said is not None:
            raise WeightLoadError(f"rank {rank}: {said}" if len(errors) > 1 else said)
    return result


def _from_all_ranks(mine: T) -> list[T]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    everyone = [mine] * parallel.tp_size
    if parallel.tp_size > 1:
        torch.distributed.all_gather_object(everyone, mine, group=parallel.tp_group.cpu_group)
    return everyone


def register_hooks() -> None:
    """Put our requests into SGLang's scheduler; called in each of its processes before it starts.

    SGLang lets a loader's error end its scheduler, so `load` is wrapped as well.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{manager}.check_weights", _check_weights, HookType.AROUND)
    HookRegistry.register(f"{manager}.update_weights_from_tensor", _update_weights, HookType.AROUND)


def _check_weights(check_weights: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.action.startswith(ACTION):
        return check_weights(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    command = json.loads(request.action.removeprefix(ACTION))
    try:
        if "stage" in command:
            _stage.begin(manager.tp_worker.model_runner.model, command)
            answer = {}
        else:
            answer = _staged(command["staged"])
    except WeightLoadError as error:
        return CheckWeightsReqOutput(success=False, message=str(error))
    return CheckWeightsReqOutput(success=True, message=json.dumps(answer))


def _update_weights(update_weights: Callable[..., Any], manager: Any, request: Any) -> Any:
    if request.load_format != LOADER:
        return update_weights(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    try:
        answer = update_weights(manager, request)
    except WeightLoadError as error:
        return UpdateWeightsFromTensorReqOutput(success=False, message=str(error))
    if answer.success:
        open_name_space(manager.scheduler)
    return answer
