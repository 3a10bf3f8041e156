"""AdamW and its learning-rate schedule, in torchtitan's containers (which save and load by parameter name)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state

from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.devices import Device


def build_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, device: Device, total_steps: int
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """The optimizer of all parameters, and the schedule over `total_steps` optimizer steps."""
    adamw = ParamGroupConfig(
        pattern=".*",
        optimizer_name="AdamW",
        optimizer_kwargs={
            "lr": config.learning_rate,
            "betas": (config.beta1, config.beta2),
            "eps": config.epsilon,
            "weight_decay": config.weight_decay,
        },
    )
    optimizer = OptimizersContainer.Config(param_groups=[adamw], implementation=device.optimizer_implementation).build(
        model_parts=[model]
    )
    # Moments exist from the start: memory that does not suffice shows at once, and a checkpoint of version 0 is exact
    # (torchtitan would make them when it saves, and count that as a step).
    for adam in optimizer:
        init_optim_state(adam)
        for state in adam.state.values():
            state["step"].zero_()
    factor = partial(
        learning_rate_factor, warmup_steps=config.warmup_steps, total_steps=total_steps, decay=config.decay
    )
    return optimizer, LRSchedulersContainer(optimizer, factor)


def learning_rate_factor(
    step: int, warmup_steps: int, total_steps: int, decay: Literal["constant", "linear", "cosine"]
) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0): a linear rise over the warm-up, whose last step
    has the peak, then a fall that would reach zero at `total_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
