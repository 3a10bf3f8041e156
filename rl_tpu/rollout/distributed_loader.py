"""How an engine takes a policy that is broadcast to it: our part of SGLang's ``/update_weights_from_distributed``.

Every bucket ends in a trailer with the hashes of its tensors (`weight_sync.ici.broadcast`). They are checked on all
tensor-parallel ranks, and the buckets kept until the last one is there and right; then all are loaded at once. So a
broadcast that breaks off or arrives damaged leaves the old policy whole, at the price of memory for a second one. Buckets
without hashes are loaded as they come, as SGLang does by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rl_tpu.rollout.prefix_cache import open_name_space
from rl_tpu.rollout.weight_loader import MIXTURE, NOTHING_LOADED, WeightLoadError, on_all_ranks
from weight_sync import Manifest, VerificationError, WeightSyncError
from weight_sync.hashing import default_threads, in_threads, xxh3_128
from weight_sync.ici.broadcast import TRAILER

NamedTensors = list[tuple[str, torch.Tensor]]


class Verified(list):
    """What is to be loaded now of buckets that were verified: nothing, or a whole version."""


class Arrival:
    """The verified buckets of the version that is being received."""

    def __init__(self) -> None:
        self.mixed = False
        """Whether the model holds some buckets of a version and not the others."""
        self._version: int | None = None
        self._buckets: list[NamedTensors] = []
        self._refused: str | None = None

    @property
    def state(self) -> str:
        """What the model holds if this bucket is not loaded."""
        return MIXTURE if self.mixed else NOTHING_LOADED

    def take(self, bucket: NamedTensors, trailer: dict[str, Any]) -> NamedTensors:
        """Check and keep a bucket; what is to be loaded now: nothing, or all buckets after the last. A bucket without
        hashes is to be loaded at once.

        Raises an error for this and all later buckets if one is damaged or missing.
        """
        if trailer["xxh3_128"][0] is None:
            self.mixed = trailer["bucket"] + 1 < trailer["buckets"]
            return bucket
        if trailer["bucket"] == 0:
            self._version, self._buckets, self._refused = trailer["version"], [], None
        try:
            self._check(bucket, trailer)
        except WeightSyncError as error:
            self._refused, self._buckets = str(error), []
            raise
        self._buckets.append(bucket)
        if len(self._buckets) < trailer["buckets"]:
            return Verified()
        buckets, self._buckets = self._buckets, []
        return Verified(pair for kept in buckets for pair in kept)

    def _check(self, bucket: NamedTensors, trailer: dict[str, Any]) -> None:
        version, number = trailer["version"], trailer["bucket"]
        if self._refused is not None:
            raise WeightSyncError(self._refused)
        if (version, number) != (self._version, len(self._buckets)):
            raise WeightSyncError(f"version {version}: bucket {number} came after {len(self._buckets)} others")
        found = in_threads(_hash, [tensor for _, tensor in bucket], default_threads())
        hashes = zip(bucket, found, trailer["xxh3_128"], strict=True)
        if wrong := [name for (name, _), mine, theirs in hashes if mine != theirs]:
            raise VerificationError(version, wrong)


def _hash(tensor: torch.Tensor) -> str:
    return xxh3_128(tensor.reshape(-1).view(torch.uint8).cpu()) if tensor.numel() else xxh3_128(b"")


_arrival = Arrival()
_covered: set[tuple] = set()


def register_hooks() -> None:
    """Called in each of SGLang's processes before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{manager}.update_weights_from_distributed", _update, HookType.AROUND)
    HookRegistry.register(f"{updater}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{updater}.load_weights_from_distributed", _load, HookType.AROUND)


def _update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    answer = update(manager, request)
    if answer.success and request.weight_version is not None:
        open_name_space(manager.scheduler)
    return answer


def _receive(receive: Callable[..., NamedTensors], updater: Any, **request: Any) -> NamedTensors:
    """Raises WeightLoadError on all ranks or on none; SGLang answers with its message."""
    if request["names"][-1:] != [TRAILER]:
        return receive(updater, **request)

    def take() -> NamedTensors:
        *bucket, (_, trailer) = receive(updater, **request)
        try:
            fields = json.loads(trailer.cpu().numpy().tobytes())
        except ValueError as error:
            raise WeightSyncError(f"the trailer of a bucket arrived damaged: {error}") from error
        return _arrival.take(bucket, fields)

    return on_all_ranks(take, _arrival.state)


def _load(load: Callable[..., tuple[bool, str]], updater: Any, named_tensors: NamedTensors) -> tuple[bool, str]:
    if not isinstance(named_tensors, Verified):
        return load(updater, named_tensors)
    if not named_tensors:
        return True, "kept until the last bucket"

    def load_all() -> str:
        success, said = load(updater, named_tensors)
        if not success:
            raise WeightLoadError(said)
        _arrival.mixed = False
        return said

    try:
        on_all_ranks(lambda: _check_fit(updater.get_model(), named_tensors), _arrival.state)
        return True, on_all_ranks(load_all, MIXTURE)
    except WeightLoadError as error:
        return False, str(error)


def _check_fit(model: torch.nn.Module, named_tensors: NamedTensors) -> None:
    from rl_tpu.rollout.coverage import check_coverage, check_tied

    layout = tuple((name, tuple(tensor.shape)) for name, tensor in named_tensors)
    if layout not in _covered:
        check_coverage(
            model, Manifest.lay_out((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors)
        )
        _covered.add(layout)
    check_tied(model, dict(named_tensors))
