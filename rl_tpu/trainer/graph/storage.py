"""Parameters, gradients and moments where programs want them, stacked, and the model's and optimizers' views of them.

The stacks are the only copy. Whoever saves, exports, publishes or loads the policy goes on doing so through the model's
parameters and the optimizers' states, which lie in the stacks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.optimizer import Optimizers

Tensors = dict[str, torch.Tensor]
STEP = "step"
"""What an optimizer that counts its updates calls the count."""


def stack_parameters(model: torch.nn.Module, layout: StackedLayout) -> Tensors:
    """Move the parameters of `model` into stacks, by the names of `layout`; the model has views of them afterwards.

    Of a parameter that is divided along its first dimension a stack holds this rank's rows, filled up with zeros to as many
    as the first rank has.
    """
    parameters, stacks = dict(model.named_parameters()), {}
    for name, held in layout.names.items():
        stacks[name] = _stack(parameters[held[0]].detach(), len(held), layout.is_stack(name))
        for index, own in enumerate(held):
            old = parameters.pop(own)
            view = _view(stacks[name], index, layout.is_stack(name), old)
            view.copy_(old.detach())
            _replace(model, old, torch.nn.Parameter(view, requires_grad=old.requires_grad))
    return stacks


def stack_gradients(model: torch.nn.Module, layout: StackedLayout) -> Tensors:
    """Gradients of zero in stacks; every parameter's `grad` is a view of one."""
    parameters, stacks = dict(model.named_parameters()), {}
    for name, held in layout.names.items():
        stacks[name] = _stack(parameters[held[0]].detach(), len(held), layout.is_stack(name))
        for index, own in enumerate(held):
            parameters[own].grad = _view(stacks[name], index, layout.is_stack(name), parameters[own])
    return stacks


def stack_moments(
    model: torch.nn.Module, layout: StackedLayout, optimizers: Optimizers, stacks: Mapping[str, torch.Tensor]
) -> Tensors:
    """Move what `optimizers` remember into `stacks`, which are made where they are missing: `name/moment`, and `step`.
    The optimizers' states are views of them afterwards."""
    parameters, stacks = dict(model.named_parameters()), dict(stacks)
    states = {id(parameter): state for each in optimizers for parameter, state in each.state.items()}
    for name, held in layout.names.items():
        for moment in states[id(parameters[held[0]])]:
            key = STEP if moment == STEP else f"{name}/{moment}"
            for index, own in enumerate(held):
                parameter, state = parameters[own], states[id(parameters[own])]
                if key not in stacks:
                    like = parameter.detach() if moment != STEP else state[STEP].to(parameter.device)
                    stacks[key] = like if moment == STEP else _stack(like, len(held), layout.is_stack(name))
                view = stacks[key]
                if moment != STEP:
                    view = _view(view, index, layout.is_stack(name), parameter)
                view.copy_(state[moment])
                state[moment] = view
    return stacks


def _stack(like: torch.Tensor, count: int, stacked: bool) -> torch.Tensor:
    """Zeros for so many of a parameter."""
    local = like.to_local() if isinstance(like, DTensor) else like
    shape = list(local.shape)
    if isinstance(like, DTensor):
        shape[0] = -(-like.shape[0] // like.device_mesh.size())
    return local.new_zeros((count, *shape) if stacked else shape)


def _view(stack: torch.Tensor, index: int, stacked: bool, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a stack that is this parameter's, of the parameter's kind."""
    view = stack[index] if stacked else stack.view_as(stack)
    if not isinstance(parameter, DTensor):
        return view
    rows = len(parameter.to_local())
    mesh, placements = parameter.device_mesh, parameter.placements
    size = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(view[:rows], mesh, placements, run_check=False, **size)


def _replace(model: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """In all modules: embedding and output layer may share a parameter."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                module.register_parameter(name, new)
