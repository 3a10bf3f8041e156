"""Optimizer, learning-rate schedule and gradient clipping, by torchtitan's parts (which save and load by name)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed.utils import clip_grad_norm_

from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.devices import Device
from rl_tpu.trainer.muon import Muon
from rl_tpu.trainer.schedule import learning_rate_factor


class Optimizers(OptimizersContainer):
    """torchtitan's optimizers, and Muon on every device: its own (DistMuon) runs on CUDA alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return Muon if name == "Muon" else OptimizersContainer._resolve_optimizer_factory(name)


class PolicyOptimizer:
    """Optimizer of all parameters of `model`, with a schedule over `total_steps` optimizer steps."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig, device: Device, total_steps: int):
        self._parameters = list(model.parameters())
        self._max_grad_norm = config.max_grad_norm
        self.optimizer = Optimizers.Config(
            param_groups=parameter_groups(model, config), implementation=device.optimizer_implementation
        ).build(model_parts=[model])
        # Moments exist from the start: memory that does not suffice shows at once, and a checkpoint of version 0 is exact
        # (torchtitan would make them when it saves, and count that as a step).
        for optimizer in self.optimizer:
            init_optim_state(optimizer)
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()
        factor = partial(
            learning_rate_factor,
            warmup_steps=config.warmup_steps,
            total_steps=total_steps,
            decay=config.decay,
            final_share=config.final_learning_rate_share,
        )
        self.schedule = LRSchedulersContainer(self.optimizer, factor)

    def step(self, apply: bool = True) -> dict[str, float]:
        """Clip the gradient, update the parameters, advance the schedule; none of it if the norm is not finite, or if the
        gradient is not to be applied. It is gone afterwards."""
        learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
        norm = self._update(learning_rate, apply)
        finite = math.isfinite(norm)
        if finite and apply:
            self.schedule.step()
        return {"grad_norm": norm, "learning_rate": learning_rate, "skipped_updates": float(apply and not finite)}

    def _update(self, learning_rate: float, apply: bool) -> float:
        """All of `step` but for the schedule; the norm of the gradient."""
        norm = float(clip_grad_norm_(self._parameters, self._max_grad_norm, foreach=False))
        if apply and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def parameter_groups(model: torch.nn.Module, config: OptimizerConfig) -> list[ParamGroupConfig]:
    """Who updates which parameters, and how: Muon, if it is chosen, the matrices of the blocks (as in arXiv 2502.16982,
    routers too); AdamW the rest. Matrices decay, vectors (norms, biases) do not."""
    sizes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    matrices = [name for name, dimensions in sizes.items() if dimensions > 1]
    in_blocks = [name for name in matrices if name.startswith("layers.")]
    adamw = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
    decay = {"weight_decay": config.weight_decay}
    groups = []
    if config.name == "muon":
        groups.append(_group(in_blocks, "Muon", {"lr": config.learning_rate, "momentum": config.momentum} | decay))
        matrices = [name for name in matrices if name not in in_blocks]
    vectors = [name for name, dimensions in sizes.items() if dimensions == 1]
    return [*groups, _group(matrices, "AdamW", adamw | decay), _group(vectors, "AdamW", adamw | {"weight_decay": 0.0})]


def _group(names: list[str], optimizer: str, settings: dict[str, Any]) -> ParamGroupConfig:
    return ParamGroupConfig(
        pattern=f"^({'|'.join(map(re.escape, names))})$", optimizer_name=optimizer, optimizer_kwargs=settings
    )
