"""Steps of the trainer, by itself on the CPU and as its programs on XLA's CPU devices.

usage: python xla_program.py MODELS_DIR OUT.pt CASE ...

A CASE is JSON: `model` (directory under MODELS_DIR), `overrides` (of the configuration), `data` and `tensor` (the mesh;
without them one device), `whole_step`. OUT.pt holds, by CASE, what both computed: statistics and gradients of a micro-batch
of four rows, and for a whole step log-probabilities and the parameters after an update.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from test_preset_gradients import configured, groups_of
from tiny_policy import OneRank, learning

from rl_tpu.algorithms.aggregation import token_weights
from rl_tpu.config.schema import ExecutionConfig
from rl_tpu.orchestrator.experience import make_experience
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch

ROWS = 4
LEARNING = ["trainer.optimizer.learning_rate=0.001", "trainer.optimizer.warmup_steps=0"]  # far enough to be seen
Tensors = dict[str, torch.Tensor]


def stacked(layout, tensors: Tensors) -> Tensors:
    """One tensor per name of the layout, of the parameters' own."""
    found = {name: [tensors[own].detach().clone() for own in held] for name, held in layout.names.items()}
    return {name: torch.stack(each) if layout.is_stack(name) else each[0] for name, each in found.items()}


def step(trainer: PolicyTrainer, batch: PackedBatch, weights: torch.Tensor, case: dict[str, Any]) -> dict[str, Tensors]:
    """What the programs compute on XLA's devices, and what the trainer does, by what it is."""
    import jax  # these, and torchtitan's parts, once the process knows its devices

    from rl_tpu.tpu.execute import execute
    from rl_tpu.tpu.partition import Partition
    from rl_tpu.trainer.graph.programs import WEIGHTS, Program, Programs
    from rl_tpu.trainer.model import build_policy

    # A model of its own, that nothing has wrapped.
    config = trainer.config.model_copy(update={"execution": ExecutionConfig(mode="graph")})
    policy = build_policy(trainer.model_dir, trainer.device, torch.device("cpu"), config)
    programs = Programs(policy, config, trainer.algorithm, trainer.distribution)
    data, tensor = case.get("data", 1), case.get("tensor", 1)
    partition = Partition(None, interpret=True)
    if data * tensor > 1:
        partition = Partition.over(jax.devices()[: data * tensor], tensor, interpret=True)
    rows = partition.rows(ROWS // data)
    layout, named = programs.layout, dict(trainer.policy.model.named_parameters())
    parameters = stacked(layout, {name: whole(parameter) for name, parameter in named.items()})
    given = {
        "parameter": parameters,
        "gradient": {name: torch.zeros_like(parameter) for name, parameter in parameters.items()},
        "buffer": dict(policy.model.named_buffers()),
        "row": batch.tensors() | {WEIGHTS: weights},
    }

    def run(program: Program) -> dict[tuple[str, str], torch.Tensor]:
        operands = {(value.kind, value.name): given[value.kind][value.name] for value in program.operands}
        return execute(program, layout, operands, partition)

    reference = batch.reference_logprobs is not None
    found = run(programs.backward(rows, batch.row_tokens, reference=reference))
    xla = {
        "statistics": {name: value for (kind, name), value in found.items() if kind == "scalar"},
        "gradients": {name: value for (kind, name), value in found.items() if kind == "gradient"},
    }
    eager = {"logprobs": {"logprobs": trainer.logprobs(batch, only_loss=True)}}
    metrics = trainer.backward(batch)
    eager["statistics"] = {name: torch.tensor(value) for name, value in metrics.items()}
    eager["gradients"] = stacked(layout, {name: whole(parameter.grad) for name, parameter in named.items()})
    if not case.get("whole_step"):
        return {"xla": xla, "eager": eager}

    found = run(programs.logprobs(rows, batch.row_tokens))
    xla["logprobs"] = {"logprobs": found["row", "logprobs"]}
    metrics = trainer.optimizer.step()
    update = programs.update()
    given["gradient"] = eager["gradients"]
    given["moment"] = {v.name: torch.zeros(v.shape) for v in update.operands if v.kind == "moment"}
    given["scalar"] = {"learning_rate": torch.tensor(metrics["learning_rate"]), "apply": torch.tensor(1.0)}
    found = run(update)
    xla["parameters"] = {name: value for (kind, name), value in found.items() if kind == "parameter"}
    xla["norm"] = {"norm": found["scalar", "grad_norm"]}
    eager["parameters"] = stacked(layout, {name: whole(parameter) for name, parameter in named.items()})
    eager["norm"] = {"norm": torch.tensor(metrics["grad_norm"])}
    return {"xla": xla, "eager": eager, "before": {"parameters": parameters}}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Where bfloat16 makes one rank shard its parameters, its share is all of them."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    models, out, cases = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    results = {}
    for text in cases:
        case = json.loads(text)
        config = configured(
            "grpo", "trainer.row_tokens=[128]", "trainer.microbatch_tokens=512", *LEARNING, *case["overrides"]
        )
        with learning(config, models / case["model"]) as trainer:
            groups = groups_of(seed=1, noise=0.3)
            (batch,), _ = asyncio.run(make_experience(groups, config, OneRank(trainer)))
            assert batch.rows == ROWS, batch.rows
            weights = token_weights(
                batch.loss_mask, batch.sample_ids, config.algorithm.aggregation, config.rollout.max_response_tokens
            )
            started = time.perf_counter()
            results[text] = step(trainer, batch, weights, case)
            print(f"{time.perf_counter() - started:5.1f} s  {text}", flush=True)
    torch.save(results, out)


if __name__ == "__main__":
    main()
