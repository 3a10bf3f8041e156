"""A Ray actor around one PolicyTrainer. Torch is imported when the environment is complete, not before."""

from __future__ import annotations

import faulthandler
import os
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rl_tpu.config.schema import RunConfig

if TYPE_CHECKING:
    import torch

    from rl_tpu.trainer.step import PolicyTrainer
    from rl_tpu.types import PackedBatch

Arrays = dict[str, np.ndarray]
"""A PackedBatch on its way through Ray, which shares numpy arrays between processes but pickles torch tensors."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, process id, the host's address, a port on which it listens."""

    node: str
    pid: int
    address: str
    port: int


class TrainerRank:
    """One rank. `place` and `start` come first; then all ranks get the same calls in the same order, through `call`."""

    def __init__(self, log: str):
        # Everything that this process and its libraries print belongs to the run.
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable()
        self._listener: socket.socket | None = None
        self._trainer: PolicyTrainer | None = None
        self._sender: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """One of the methods below. What it raises goes to the driver as one line, and to this rank's log in full."""
        try:
            return getattr(self, method)(*args)
        except Exception:
            traceback.print_exc()
            raise

    def place(self) -> Place:
        """Where this rank is; from now on it holds its port, so that nobody else gets it before the ranks have met."""
        self._listener = socket.create_server(("", 0))
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return Place(context.get_node_id(), os.getpid(), address, self._listener.getsockname()[1])

    def start(self, config: RunConfig, model_dir: str, run_id: str, environment: Mapping[str, str]) -> None:
        """Meet the other ranks, build and load the policy, open this rank's end of weight_sync."""
        os.environ.update(environment)
        import torch
        import torch.distributed as dist

        from rl_tpu.algorithms.distribution import Distribution
        from rl_tpu.trainer.step import PolicyTrainer
        from weight_sync import open_sender

        rollout = config.rollout
        self._trainer = PolicyTrainer(
            config.trainer,
            config.algorithm,
            Path(model_dir),
            device=config.cluster.device,
            distribution=Distribution(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p),
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.seed,
            store=self._meet(config.trainer.start_timeout_s),
        )
        self._engine_dtype: torch.dtype = getattr(torch, config.rollout.dtype)
        rank, ranks = self._trainer.rank, self._trainer.ranks
        timeout = timedelta(seconds=config.weight_sync.timeout_s)
        self._sender = open_sender(
            config.weight_sync.transport,
            run_id=run_id,
            rank=rank,
            world_size=ranks,
            group=dist.new_group(backend="gloo", timeout=timeout) if ranks > 1 else None,
            hashes=config.weight_sync.verify,
            **config.weight_sync.options,
        )

    def learn(self, minibatches: list[Arrays]) -> list[dict[str, float]]:
        """All optimizer steps on `minibatches`; the metrics of each, over all ranks."""
        return self._trainer.learn([_batch(arrays) for arrays in minibatches])

    def logprobs(self, batches: list[Arrays], reference: bool) -> list[np.ndarray]:
        """Log-probabilities of the loss tokens in this rank's rows of each batch, [R / data ranks, L] float32."""
        return [self._trainer.logprobs(_batch(batch), reference=reference, only_loss=True).numpy() for batch in batches]

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""
        self._trainer.refresh_reference()

    def publish(self, version: int, whole: bool) -> tuple[dict[str, Any], dict[str, float]]:
        """Handle of the policy, published as `version`, and this rank's times and bytes of publishing it."""
        return self._sender.publish(version, self._trainer.shards(self._engine_dtype), whole), self._sender.stats

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """The policy as the engines should hold it, on rank 0; elsewhere empty."""
        return {name: tensor.to(self._engine_dtype) for name, tensor in self._trainer.full_tensors().items()}

    def save(self, directory: str) -> None:
        self._trainer.save(Path(directory))

    def saved(self, wait: bool) -> bool:
        """Whether what was saved is on disk; with `wait`, once it is."""
        return self._trainer.saved(wait)

    def load(self, directory: str) -> None:
        self._trainer.load(Path(directory))

    def export_hf(self, directory: str) -> None:
        self._trainer.export_hf(Path(directory))

    def close(self) -> None:
        """Give back what outlives a process."""
        if self._sender is not None:
            self._sender.close()

    def _meet(self, timeout_s: float) -> Any:
        """The store in which the ranks find each other; rank 0 serves it on the port it has held since `place`."""
        import torch.distributed as dist

        first = os.environ["RANK"] == "0"
        port = int(os.environ["MASTER_PORT"])
        descriptor = self._listener.detach() if first else None
        if not first:
            self._listener.close()
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            int(os.environ["WORLD_SIZE"]),
            is_master=first,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )


def arrays_of(batch: PackedBatch) -> Arrays:
    return {name: tensor.numpy() for name, tensor in batch.tensors().items()}


def _batch(arrays: Arrays) -> PackedBatch:
    import torch

    from rl_tpu.types import PackedBatch

    # Ray's arrays are read-only views of shared memory; torch wants its own.
    return PackedBatch(**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
