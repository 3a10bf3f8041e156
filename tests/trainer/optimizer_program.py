"""What every rank does in test_optimizer_on_ranks.py: `python optimizer_program.py MODEL_DIR PARALLEL.json OUT_DIR`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import make_samples, trainer_config
from torch.distributed.tensor import DTensor, Replicate

from rl_tpu.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer

MUON = OptimizerConfig(name="muon", learning_rate=1e-3, weight_decay=0.1)


def local(value: object) -> object:
    return value.to_local() if isinstance(value, DTensor) else value


def set_gradients(trainer: PolicyTrainer, seed: int, bad: str = "") -> bool:
    """Gradients that are the same for every layout, that of the parameter `bad` with a NaN in its last entry; whether this
    rank holds it."""
    draw, holds_it = torch.Generator().manual_seed(seed), False
    for name, parameter in trainer.policy.model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=draw) / 1000
        if name == bad:
            gradient[-1, -1] = torch.nan
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
            gradient = whole.redistribute(placements=parameter.placements)
        parameter.grad = gradient
        holds_it |= bool(local(gradient).isnan().any())
    return holds_it


def held(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """This rank's part of weights and moments, and where the schedule is."""
    states = trainer.policy.model.state_dict() | trainer.optimizer.optimizer.state_dict()
    states |= trainer.optimizer.schedule.state_dict()
    return {
        name: torch.as_tensor(local(value)).clone()
        for name, value in states.items()
        if not isinstance(value, tuple | str)
    }


def exercise(model_dir: Path, out: Path, parallel: dict, store: dist.Store | None = None) -> None:
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1))
    trainer = PolicyTrainer(trainer_config(optimizer=MUON, parallel=parallel), algorithm, model_dir, store=store)
    results = {}
    for seed in (0, 1):
        set_gradients(trainer, seed)
        results["metrics"] = trainer.optimizer.step()
    results["after"] = trainer.full_tensors()

    results["holds_nan"] = set_gradients(trainer, 2, bad="layers.1.feed_forward.w2.weight")
    before = held(trainer)
    results["skipped"] = trainer.optimizer.step()
    after = held(trainer)
    results["changed"] = [name for name in before if not torch.equal(before[name], after[name])]
    results["compared"] = len(before)

    batch = pack(make_samples(8), [64], trainer.layout.data_ranks, 128)
    trainer.refresh_reference()
    results["reference"] = trainer.logprobs(batch, reference=True)
    trainer.save(out / "checkpoint")
    set_gradients(trainer, 3)
    trainer.optimizer.step()
    results["next"] = trainer.full_tensors()
    trainer.refresh_reference()
    for name, directory in {"again": out / "checkpoint", "from_other": out / "other"}.items():
        if directory.is_dir():
            trainer.load(directory)
            results[f"reference_{name}"] = trainer.logprobs(batch, reference=True)
            set_gradients(trainer, 3)
            trainer.optimizer.step()
            results[name] = trainer.full_tensors()
    torch.save(results, out / f"rank-{trainer.rank}.pt")
    trainer.close()


def main(model_dir: str, parallel: str, out: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    exercise(Path(model_dir), Path(out), json.loads(parallel), dist.PrefixStore("trainer", store))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])  # rank 0 serves the store until all are through


if __name__ == "__main__":
    main(*sys.argv[1:])
