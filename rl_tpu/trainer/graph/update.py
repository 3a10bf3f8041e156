"""Clipping and the optimizer's step as a function of tensors, computed by torch's own optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl_tpu.config.schema import OptimizerConfig
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.sharding import Sharding
from rl_tpu.trainer.muon import Muon
from rl_tpu.trainer.optimizer import Optimizers, parameter_groups

Tensors = Mapping[str, torch.Tensor]

STATE = {"AdamW": ("exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}
"""Moments of an optimizer that are as large as the parameter."""


class GraphOptimizer:
    """The optimizers that `config` asks for, of parameters that are stacked as `layout` says, or of a rank's shares."""

    def __init__(
        self, model: torch.nn.Module, layout: StackedLayout, config: OptimizerConfig, sharding: Sharding | None = None
    ):
        self._max_norm, self._sharding = config.max_grad_norm, sharding
        self._groups: list[tuple[str, list[str], dict[str, Any]]] = []
        for group in parameter_groups(model, config):
            names = [name for name, held in layout.names.items() if re.fullmatch(group.pattern, held[0])]
            self._groups.append((group.optimizer_name, names, dict(group.optimizer_kwargs)))

    def moments(self, parameters: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What the optimizers remember, empty on the meta device: `name/moment` as the parameter of that name, and
        `step`, the number of updates so far."""
        shapes = {parameter.name: parameter.shape for parameter in parameters}
        moments = {
            f"{name}/{moment}": torch.empty(shapes[name], device="meta")
            for optimizer, names, _ in self._groups
            for name in names
            for moment in STATE[optimizer]
        }
        return moments | {"step": torch.empty((), device="meta")}

    def step(
        self,
        parameters: Tensors,
        gradients: Tensors,
        moments: Tensors,
        learning_rate: torch.Tensor,
        apply: torch.Tensor,
    ) -> tuple[torch.Tensor, Tensors, Tensors]:
        """(norm of the gradients, next parameters, next moments): the given ones where the norm is not finite or `apply`
        is 0. Decided on the device, so that no program waits for the host."""
        norm = get_total_norm(list(gradients.values()), foreach=False)
        if self._sharding:
            norm = self._sharding.norm(norm)
        new = {name: parameter.clone() for name, parameter in parameters.items()}
        for name, parameter in new.items():
            parameter.grad = gradients[name].clone()
        clip_grads_with_norm_(list(new.values()), self._max_norm, norm, foreach=False)
        after = {name: moment.clone() for name, moment in moments.items()}
        for optimizer, names, settings in self._groups:
            self._update(optimizer, {name: new[name] for name in names}, settings, after, learning_rate)
        after["step"] = moments["step"] + 1
        wanted = norm.isfinite() & (apply > 0)
        chosen = (
            {name: torch.where(wanted, values[name], old[name]) for name in old}
            for values, old in ((new, parameters), (after, moments))
        )
        return norm, *chosen

    def _update(
        self,
        name: str,
        parameters: Tensors,
        settings: dict[str, Any],
        moments: dict[str, torch.Tensor],
        rate: torch.Tensor,
    ) -> None:
        """Change `parameters` and their `moments` in place."""
        if not parameters:
            return
        options = {"capturable": True, "foreach": False} if name == "AdamW" else {}
        make = Optimizers._resolve_optimizer_factory(name)
        if name == "Muon" and self._sharding:
            make = partial(ShardedMuon, self._sharding, {id(each): own for own, each in parameters.items()})
        optimizer = make(list(parameters.values()), **settings | options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for own, parameter in parameters.items():
            optimizer.state[parameter] = {moment: moments[f"{own}/{moment}"] for moment in STATE[name]}
            if name == "AdamW":
                optimizer.state[parameter]["step"] = moments["step"].clone()
        # Optimizers check what a device can capture, and do not know of captures on a CPU.
        with torch.compiler._compile_session_context():
            optimizer.step()


class ShardedMuon(Muon):
    """Of a rank's shares of stacked matrices: they are gathered to find their directions, which every rank does alike."""

    def __init__(self, sharding: Sharding, names: Mapping[int, str], *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._sharding, self._names = sharding, names

    def step_of(self, parameter: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        if moments.ndim > 3:  # shares of experts: every matrix is whole
            return super().step_of(parameter, moments)
        whole = self._sharding.gathered(self._names[id(parameter)], moments)
        return self._sharding.own(super().step_of(parameter, whole))
