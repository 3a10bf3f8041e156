"""How large the model is on every device: counted on the trainer's own model, built without memory (device `meta`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_tpu.config.compose import resource
from rl_tpu.config.schema import RunConfig, TrainerConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.errors import RunError, UserError


@dataclass(frozen=True)
class ModelSource:
    """Where config.json was found."""

    directory: Path
    bundled: bool
    """It is the one that comes with this package, because the model itself is not on this machine."""


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of everything that stays in memory as long as the run lasts, counted tensor by tensor."""

    parameters: int
    """Numbers the policy consists of; tied ones once."""
    weights: int
    """Of one trainer device: its part of the float32 weights, and rotary tables."""
    gradients: int
    """Of one trainer device."""
    moments: int
    """Of one trainer device: what its optimizer keeps."""
    reference: int
    """Of one trainer device: its part of the reference policy in `param_dtype`; 0 without one."""
    reference_on_host: bool
    """The reference policy lies in host memory and comes to the device layer by layer."""
    checkpoint: int
    """Of one checkpoint, of all ranks together."""
    engine_weights: int
    """Of one rollout device: matrices divided by `rollout.tensor_parallel`, vectors whole."""
    engine_policy: int
    """Of the whole policy in the engine's type: what a sync carries."""
    kv_bytes_per_token: int
    """Of one rollout device: keys and values of one token in all layers."""


def find_model(path: str, make: str | None = None) -> ModelSource:
    """The directory with the config.json of `model.path`; without it on this machine, the bundled one of that name.

    Raises UserError where there is neither.
    """
    directory = Path(path).expanduser().resolve()
    if (directory / "config.json").is_file():
        return ModelSource(directory, bundled=False)
    bundled = resource("models_config") / directory.name
    if (bundled / "config.json").is_file():
        return ModelSource(bundled, bundled=True)
    if make:
        raise UserError(f"model.path: {directory} is made by the first run; now: python {make} --out {directory}")
    known = ", ".join(sorted(found.name for found in resource("models_config").iterdir()))
    raise UserError(
        f"model.path: {directory} has no config.json; put it there (the weights are not needed), or name a model whose"
        f" config.json is bundled: {known}"
    )


def measure(config: RunConfig, model_dir: Path) -> ModelSizes:
    """Count the bytes of `model_dir`'s model as `config` divides it.

    Rank 0 of the trainer is built on `meta` in a process group that only pretends to have the other ranks: sharding,
    moments and types are those of a run. Rank 0 has the largest shards.

    Raises UserError as the trainer does, for a model that it cannot take.
    """
    device = get_device("cpu")  # torch's device type of the meshes; no tensor is ever made
    prepare_torchtitan(device)
    from rl_tpu.trainer.families import model_spec
    from rl_tpu.trainer.model import build_policy, read_config
    from rl_tpu.trainer.optimizer import PolicyOptimizer

    trainer, rollout = _uncompiled(config.trainer), config.rollout
    meta = torch.device("meta")
    with _pretended_ranks(config.trainer_ranks):
        model = build_policy(model_dir, device, meta, trainer).model
        parameters = list(model.parameters())
        weights = local_bytes(parameters)
        optimizers = PolicyOptimizer(model, trainer.optimizer, device, total_steps=1).optimizer
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        moments = [value for value in states if isinstance(value, torch.Tensor)]
        frozen = None
        if config.algorithm.kl.coefficient:
            on_device = trainer.model_copy(update={"offload_reference": False})
            frozen = build_policy(model_dir, device, meta, on_device, frozen=True).model
        element = getattr(torch, rollout.dtype).itemsize
        matrices = sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)
        vectors = sum(parameter.numel() for parameter in parameters if parameter.ndim == 1)
        return ModelSizes(
            parameters=matrices + vectors,
            weights=weights + local_bytes(model.buffers()),
            gradients=weights,
            moments=local_bytes(moments),
            reference=local_bytes([*frozen.parameters(), *frozen.buffers()]) if frozen else 0,
            reference_on_host=frozen is not None and trainer.offload_reference,
            checkpoint=global_bytes([*parameters, *moments]),
            engine_weights=(-(-matrices // rollout.tensor_parallel) + vectors) * element,
            engine_policy=(matrices + vectors) * element,
            kv_bytes_per_token=_kv_bytes(model_spec(read_config(model_dir), 1).model, config),
        )


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's parts."""
    return global_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)


def global_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kv_bytes(model, config: RunConfig) -> int:
    """Keys and values of one token on one rollout device. Ranks that outnumber the key-value heads hold copies."""
    rollout, attention = config.rollout, model.first_attention
    eight_bits = str(rollout.server_options.get("kv_cache_dtype", "auto")).startswith("fp8")
    element = 1 if eight_bits else getattr(torch, rollout.dtype).itemsize
    heads = -(-(attention.n_kv_heads or attention.n_heads) // rollout.tensor_parallel)
    return 2 * len(model.layers) * heads * attention.head_dim * element


def _uncompiled(trainer: TrainerConfig) -> TrainerConfig:
    """Sizes do not depend on how operations are run."""
    execution = trainer.execution.model_copy(update={"mode": "eager"})
    return trainer.model_copy(update={"execution": execution})


@contextmanager
def _pretended_ranks(ranks: int) -> Iterator[None]:
    """torch's process group for such cases: this process is rank 0, collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RunError("sizes are counted in a process that is in no process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
