"""AdamW, its learning-rate schedule and gradient clipping, by torchtitan's parts (which save and load by name)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed.utils import clip_grad_norm_

from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.devices import Device
from rl_tpu.trainer.schedule import learning_rate_factor


class PolicyOptimizer:
    """Optimizer of all parameters of `model`, with a schedule over `total_steps` optimizer steps."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, device: Device, total_steps: int):
        self._parameters = list(model.parameters())
        self._max_grad_norm = config.max_grad_norm
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
        self.optimizer = OptimizersContainer.Config(
            param_groups=[adamw], implementation=device.optimizer_implementation
        ).build(model_parts=[model])
        # Moments exist from the start: memory that does not suffice shows at once, and a checkpoint of version 0 is exact
        # (torchtitan would make them when it saves, and count that as a step).
        for adam in self.optimizer:
            init_optim_state(adam)
            for state in adam.state.values():
                state["step"].zero_()
        factor = partial(
            learning_rate_factor, warmup_steps=config.warmup_steps, total_steps=total_steps, decay=config.decay
        )
        self.schedule = LRSchedulersContainer(self.optimizer, factor)

    def step(self, apply: bool = True) -> dict[str, float]:
        """Clip the gradient, update the parameters, advance the schedule; none of it if the norm is not finite, or if the
        gradient is not to be applied. It is gone afterwards."""
        norm = float(clip_grad_norm_(self._parameters, self._max_grad_norm, foreach=False))
        finite = math.isfinite(norm)
        learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
        if finite and apply:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": learning_rate, "skipped_updates": float(not finite)}
