"""Other ways to hand tensors to another process of this host, for ``python -m weight_sync.bench --baselines``.

Each starts from private tensors and ends when the other process has them: as views of memory that the store owns (Ray
with numpy, safetensors) or as tensors of its own (the others). None of them verifies what arrived; the bench does.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weight_sync.bench.baselines import Baseline, Open
from weight_sync.bench.payload import Payload, sums
from weight_sync.bench.processes import State, Worker

Tensors = dict[str, torch.Tensor]
DEADLINE_S = 300
STORE_FACTOR = 3
"""Room in Ray's object store, in payloads: an object is freed some time after its last reference is gone."""


def baselines(payload: Payload) -> dict[str, Open]:
    store_bytes = max(10**8, STORE_FACTOR * payload.nbytes)
    return {
        "ray.put, numpy arrays": partial(RayStore, store_bytes),
        "ray actor argument, torch tensors": partial(RayArgument, store_bytes),
        "safetensors in /dev/shm": partial(Files, save_safetensors, load_safetensors),
        "torch.save in /dev/shm": partial(Files, torch.save, torch_load),
    }


def require_equal(sent: Tensors, arrived: dict[str, int]) -> None:
    wrong = [name for name, value in sums(sent).items() if arrived.get(name) != value]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors did not arrive, {wrong[0]} first")


# --- Ray ---


class Holder:
    """The other process, a Ray actor."""

    def __init__(self):
        torch.set_num_threads(1)

    def get(self, references: list) -> None:
        import ray

        self.tensors = ray.get(references[0])

    def take(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def sums(self) -> dict[str, int]:
        """Of what it holds, which it then lets go."""
        tensors, self.tensors = self.tensors, None
        return sums({name: _as_tensor(value) for name, value in tensors.items()})


def _as_tensor(value: np.ndarray | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.frombuffer(value.data, dtype=torch.int16)  # a read-only view of the store


class RayStore(Baseline):
    """``ray.put`` of numpy arrays, which Ray maps in the reader without a copy."""

    def __init__(self, store_bytes: int, tensors: Tensors):
        import ray

        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=store_bytes,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # the actor must find this module
        )
        self._ray, self._tensors = ray, tensors
        self._arrays = {name: tensor.view(torch.int16).numpy() for name, tensor in tensors.items()}
        self._holder = ray.remote(num_cpus=0)(Holder).remote()
        self._ask(self._holder.__ray_ready__.remote())

    def _ask(self, reference):
        return self._ray.get(reference, timeout=DEADLINE_S)

    def transfer(self) -> None:
        reference = self._ray.put(self._arrays)
        self._ask(self._holder.get.remote([reference]))

    def check(self) -> None:
        require_equal(self._tensors, self._ask(self._holder.sums.remote()))
        time.sleep(0.3)  # the store frees the object

    def close(self) -> None:
        self._ray.shutdown()


class RayArgument(RayStore):
    """torch tensors as an argument of an actor's method."""

    def transfer(self) -> None:
        self._ask(self._holder.take.remote(self._tensors))


# --- files ---


def save_safetensors(tensors: Tensors, path: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)


def load_safetensors(path: str) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path)


def torch_load(path: str) -> Tensors:
    return torch.load(path, weights_only=True)


class Files(Baseline):
    """A file per round, written here and read by the other process."""

    def __init__(self, save, load, tensors: Tensors):
        self._save, self._load, self._tensors = save, load, tensors
        self._directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="weight_sync-bench-"))
        self._reader = Worker("reader")
        self._round = 0

    def _ask(self, function, *arguments):
        self._reader.start(function, *arguments)
        return self._reader.finish(time.monotonic() + DEADLINE_S)

    def transfer(self) -> None:
        self._round += 1  # a new name: the reader may have mapped the old file
        path = str(self._directory / f"round-{self._round}")
        self._save(self._tensors, path)
        self._ask(read, self._load, path)

    def check(self) -> None:
        require_equal(self._tensors, self._ask(sums_of_what_was_read))
        for path in self._directory.iterdir():
            path.unlink()

    def close(self) -> None:
        self._reader.close()
        shutil.rmtree(self._directory)


def read(state: State, load, path: str) -> None:
    state["tensors"] = load(path)


def sums_of_what_was_read(state: State) -> dict[str, int]:
    return sums(state.pop("tensors"))
