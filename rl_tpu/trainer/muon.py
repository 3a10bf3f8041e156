"""Muon for matrices that are split over ranks, and for stacks of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

RMS_OF_ADAMW = 0.2
"""An update of Muon is scaled to the root mean square that AdamW's usually have (arXiv 2502.16982, section 2.2)."""


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is the nearest orthogonal matrix (https://kellerjordan.github.io/posts/muon), with
    Nesterov's step and Moonshot's scale, so that learning rate and weight decay are those of AdamW.

    It is `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which however takes only matrices [rows, columns], and splits
    its products over the ranks that share one. Here a parameter may also be a stack of matrices [experts, rows, columns];
    moments are split as the parameters are, and a matrix is gathered to find its direction, which every rank does alike.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameter: torch.Tensor, rate: float, momentum: float, decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        moment = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        step = self.step_of(parameter, gradient.lerp(moment, momentum))
        parameter.mul_(1 - rate * decay)
        parameter.sub_(step.mul_(rate))  # a rate may be a tensor

    def step_of(self, parameter: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        """How far a learning rate of 1 moves against `moments`, which are as large as the parameter."""
        return scaled_direction(moments)


def scaled_direction(matrices: torch.Tensor) -> torch.Tensor:
    """`direction`, of the root mean square of AdamW's updates."""
    return direction(matrices) * (RMS_OF_ADAMW * math.sqrt(max(matrices.shape[-2:])))


def direction(matrices: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix near each of `matrices` [..., rows, columns], split over the ranks as they are."""
    if isinstance(matrices, DTensor):
        mesh, placements = matrices.device_mesh, matrices.placements
        whole = DTensor.from_local(direction(matrices.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)
    if matrices.ndim > 2:
        return torch.stack([direction(matrix) for matrix in matrices])
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    return _zeropower_via_newtonschulz(matrices, coefficients, DEFAULT_NS_STEPS, EPS).to(matrices.dtype)
