"""The policy's programs captured once per shape and run as graphs; parameters, gradients and moments stay in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rl_tpu.devices import Device
from rl_tpu.trainer.compilations import Compilations
from rl_tpu.trainer.graph.inplace import in_place
from rl_tpu.trainer.graph.layers import StackedLayout
from rl_tpu.trainer.graph.programs import WEIGHTS, Program, Programs, Value
from rl_tpu.trainer.graph.sharding import Sharding
from rl_tpu.trainer.graph.storage import stack_gradients, stack_moments, stack_parameters
from rl_tpu.trainer.optimizer import PolicyOptimizer
from rl_tpu.trainer.policy import Policy
from rl_tpu.trainer.reference import ReferencePolicy
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Callable:
    """A program that can be called, what it takes, and what it returns besides what it writes into."""

    run: Callable[..., list[torch.Tensor]]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def __call__(self, tensors: Mapping[str, Tensors]) -> dict[str, torch.Tensor]:
        """Results by name, from operands by kind and name."""
        with torch.no_grad():
            found = self.run(*[tensors[operand.kind][operand.name] for operand in self.operands])
        return {result.name: tensor for result, tensor in zip(self.results, found, strict=True)}


class GraphExecution:
    """What a rank computes with the policy, micro-batch by micro-batch, by captured programs. Its twin is
    `execution.EagerExecution`.

    From here on the parameters of both policies lie in stacks of layers, of which their models have views.
    """

    def __init__(
        self,
        policy: Policy,
        reference: ReferencePolicy | None,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        distribution: Distribution,
        device: Device,
        loss: Literal["policy", "supervised"],
    ):
        self._policy, self._config, self._device = policy, config, device
        self._programs = Programs(
            policy, config, algorithm, distribution, loss, device=policy.device, sharding=_sharding(policy)
        )
        self.compilations = Compilations(config.execution.max_compilations)
        self._callables: dict[tuple[Any, ...], _Callable] = {}
        self._own = self._stacked(policy.model)
        self._reference = self._stacked(reference.model) if reference else {}

    def build_optimizer(self, total_steps: int) -> PolicyOptimizer:
        """The optimizer of the policy's parameters."""
        model, layout, config = self._policy.model, self._programs.layout, self._config.optimizer
        optimizer = ProgramOptimizer(model, config, self._device, total_steps, self._update)
        self._own["gradient"] = stack_gradients(
            model, layout
        )  # only now: a gradient keeps optimizers from making moments

        def stack(*_: Any) -> None:
            self._own["moment"] = stack_moments(model, layout, optimizer.optimizer, self._own.get("moment", {}))

        stack()
        for each in optimizer.optimizer:
            each.register_load_state_dict_post_hook(stack)
        return optimizer

    def backward(self, rows: PackedBatch, weights: torch.Tensor, tally: Tally) -> None:
        """Add to the parameters' gradients that of `microbatch_loss`, whose statistics go into `tally`."""
        shape, reference = (rows.rows, rows.row_tokens), rows.reference_logprobs is not None
        program = self._callable(self._programs.backward, *shape, reference=reference)
        given = rows.to(self._policy.device).tensors() | {WEIGHTS: weights.to(self._policy.device)}
        tally.include(program(self._own | {"row": given}))

    def logprobs(self, rows: PackedBatch, *, reference: bool, only_loss: bool) -> torch.Tensor:
        """Log-probabilities of the labels, [R, L] float32; with `only_loss` of those under the loss mask alone. Of the
        policy, or of the reference policy."""
        if not only_loss:
            rows = replace(rows, loss_mask=torch.ones_like(rows.loss_mask))
        program = self._callable(self._programs.logprobs, rows.rows, rows.row_tokens, frozen=reference)
        tensors = self._reference if reference else self._own
        return program(tensors | {"row": rows.to(self._policy.device).tensors()})["logprobs"]

    def reshard(self) -> None:
        """Nothing outlives a program."""

    def _update(self, learning_rate: float, apply: bool) -> float:
        scalars = {"learning_rate": learning_rate, "apply": float(apply)}
        given = {name: torch.tensor(value, device=self._policy.device) for name, value in scalars.items()}
        return float(self._callable(self._programs.update)(self._own | {"scalar": given})["grad_norm"])

    def _callable(self, capture: Callable[..., Program], *shape: int, **options: bool) -> _Callable:
        """The program, captured and compiled if it is the first of its shape."""
        key = (capture.__name__, *shape, *options.items())
        if key not in self._callables:
            self.compilations.need(" ".join([capture.__name__, *(name for name, on in options.items() if on)]), *shape)
            program = capture(*shape, **options)
            graph, results = in_place(program)
            self._callables[key] = _Callable(self._device.compile_graph(graph), program.operands, results)
        return self._callables[key]

    def _stacked(self, model: torch.nn.Module) -> dict[str, Tensors]:
        return {"parameter": stack_parameters(model, self._programs.layout), "buffer": dict(model.named_buffers())}


class ProgramOptimizer(PolicyOptimizer):
    """Settings, states and schedule of the optimizers, whose step is a program.

    Args:
        update: (learning rate, whether to apply the gradients) -> their norm. It changes nothing if that is not finite,
            and leaves gradients of zero.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimizerConfig,
        device: Device,
        total_steps: int,
        update: Callable[[float, bool], float],
    ):
        super().__init__(model, config, device, total_steps)
        self._program = update
        for optimizer in self.optimizer:
            optimizer._opt_called = True  # else a schedule warns that nothing was updated yet

    def _update(self, learning_rate: float, apply: bool) -> float:
        return self._program(learning_rate, apply)


def _sharding(policy: Policy) -> Sharding | None:
    """How the ranks divide the parameters, which are DTensors then."""
    if policy.data_group is None:
        return None
    layout, parameters = StackedLayout.of(policy.model), dict(policy.model.named_parameters())
    return Sharding(policy.data_group, {name: len(parameters[held[0]]) for name, held in layout.names.items()})
