"""A model whose equal layers are one loop over their stacked parameters, for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.utils import stateless
from torchtitan.models.common.decoder import Decoder

from rl_tpu.trainer.graph.scan import scan


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers that differ in their numbers alone: their keys in `model.layers`, and the names of the
    parameters that each has."""

    layers: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def prefix(self) -> str:
        return f"layers.{self.layers[0]}-{self.layers[-1]}"


@dataclass(frozen=True)
class StackedLayout:
    """Which parameters of a model are stacked under which name: `layers.0-35.ffn_norm.weight` is [36, ...]."""

    runs: tuple[LayerRun, ...]
    names: Mapping[str, tuple[str, ...]]
    """Name of every tensor -> the parameters that it holds, several where it is a stack."""

    @classmethod
    def of(cls, model: Decoder) -> StackedLayout:
        runs = tuple(_runs(model))
        names: dict[str, tuple[str, ...]] = {}
        in_runs = {f"layers.{layer}.{name}" for run in runs for layer in run.layers for name in run.parameters}
        for name, _ in model.named_parameters():
            if name not in in_runs:
                names[name] = (name,)
        for run in runs:
            for name in run.parameters:
                names[f"{run.prefix}.{name}"] = tuple(f"layers.{layer}.{name}" for layer in run.layers)
        return cls(runs, names)

    def is_stack(self, name: str) -> bool:
        """Whether the tensor's first dimension counts layers."""
        return any(name.startswith(f"{run.prefix}.") for run in self.runs)


def _runs(model: Decoder) -> Iterator[LayerRun]:
    current: list[str] = []
    signature = None
    for key, layer in model.layers.items():
        own = [(name, parameter.shape) for name, parameter in layer.named_parameters()], _modules(layer)
        if current and own != signature:
            yield LayerRun(tuple(current), tuple(name for name, _ in signature[0]))
            current = []
        current.append(key)
        signature = own
    yield LayerRun(tuple(current), tuple(name for name, _ in signature[0]))


def _modules(layer: torch.nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in layer.named_modules()]


class _LayerLoop(torch.nn.Module):
    """Stands for the layers of a run: called like one of them, it computes them all."""

    def __init__(self, layer: torch.nn.Module, run: LayerRun, stacks: list[torch.Tensor], cast):
        super().__init__()
        self._call = (layer, run, stacks, cast)  # in a tuple: none of it belongs to this module

    def forward(self, hidden: torch.Tensor, attention: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        layer, run, stacks, cast = self._call
        buffers = dict(layer.named_buffers())

        def body(hidden, *operands):
            parameters = zip(run.parameters, operands[: len(stacks)], strict=True)
            own = {name: cast(f"{run.prefix}.{name}", parameter) for name, parameter in parameters}
            attention, positions, *values = operands[len(stacks) :]
            return torch.func.functional_call(
                layer, own | dict(zip(buffers, values, strict=True)), (hidden, attention, positions)
            )

        return scan(body, hidden, stacks, [attention, positions, *buffers.values()])


@contextmanager
def stacked(
    model: Decoder,
    layout: StackedLayout,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    cast,
) -> Iterator[None]:
    """Within it `model` computes with `parameters`, by the names of the layout, and `buffers`, by their own.

    cast(name, parameter) is what a layer, or the model around the layers, gets of a parameter.
    """
    layers, training = model.layers, model.training
    # While they train, torchtitan's experts count their tokens in a buffer, and a program changes none.
    model.eval()
    around = {name: cast(name, parameters[name]) for name, held in layout.names.items() if held == (name,)}
    with stateless._reparametrize_module(model, around | dict(buffers), tie_weights=True):
        model.layers = torch.nn.ModuleDict(
            {
                run.layers[0]: _LayerLoop(
                    layers[run.layers[0]], run, [parameters[f"{run.prefix}.{name}"] for name in run.parameters], cast
                )
                for run in layout.runs
            }
        )
        try:
            yield
        finally:
            model.layers = layers
            model.train(training)
