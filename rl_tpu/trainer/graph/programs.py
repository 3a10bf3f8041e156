"""The trainer's programs as graphs: what a micro-batch adds to the gradients, log-probabilities, and the update.

They are captured from the code that runs eagerly as well (Policy, PolicyLoss, torch's optimizers), with shapes that depend
on no data: one graph for each shape of a micro-batch and one for the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
from torch.fx import GraphModule

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.trainer.graph.capture import capture
from rl_tpu.trainer.graph.layers import StackedLayout, stacked
from rl_tpu.trainer.graph.sharding import Sharding
from rl_tpu.trainer.graph.update import GraphOptimizer
from rl_tpu.trainer.kernels.unshard import accumulate, unshard
from rl_tpu.trainer.loss import PolicyLoss
from rl_tpu.trainer.microbatch import microbatch_loss
from rl_tpu.trainer.policy import Policy
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch

Kind = Literal["parameter", "gradient", "moment", "buffer", "row", "scalar"]


@dataclass(frozen=True)
class Value:
    """An operand or a result of a program: what it is, its name among those, its shape and type."""

    kind: Kind
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Program:
    """A graph, its operands and its results, in its order. A result that is named and of the kind of an operand takes its
    place: the operand's memory may hold it."""

    name: str
    graph: GraphModule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def replaced(self) -> tuple[int, ...]:
        """Indices of the operands that a result takes the place of."""
        results = {(result.kind, result.name) for result in self.results}
        return tuple(i for i, operand in enumerate(self.operands) if (operand.kind, operand.name) in results)


class Programs:
    """The programs of one policy under one configuration.

    Args:
        policy: whose model may be on the meta device: nothing is computed.
        device: where the tensors are that the graphs make themselves.
        sharding: how ranks share the parameters; the programs are then those of one rank, with the collectives in them.
    """

    def __init__(
        self,
        policy: Policy,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        distribution: Distribution,
        loss: Literal["policy", "supervised"] = "policy",
        *,
        device: torch.device | str = "cpu",
        sharding: Sharding | None = None,
    ):
        self._device, self._sharding = torch.device(device), sharding
        self._policy = replace(policy, static_shapes=True, device=self._device)
        self._algorithm, self._distribution = algorithm, distribution
        self._loss = PolicyLoss(algorithm) if loss == "policy" else None
        self._dtype = getattr(torch, trainer.param_dtype)
        self._optimizer = trainer.optimizer
        self.layout = StackedLayout.of(policy.model)
        shapes = {name: parameter for name, parameter in policy.model.named_parameters()}
        self.parameters = tuple(
            Value("parameter", name, self._shape(name, shapes[held[0]].shape), torch.float32)
            for name, held in self.layout.names.items()
        )
        self._buffers = tuple(_values("buffer", dict(policy.model.named_buffers())))

    def logprobs(self, rows: int, row_tokens: int, *, frozen: bool = False) -> Program:
        """Log-probabilities of the loss tokens of a micro-batch, [rows, row_tokens]; of a `frozen` policy, whose
        parameters are in `param_dtype`."""
        operands = [*self._weights(frozen), *self._buffers, *_row_values(rows, row_tokens, LABELS)]

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = Operands(operands, tensors)
            with self._computing(given):
                logprobs, _ = self._policy.logprobs(given.rows(), self._distribution, only_loss=True)
            return [logprobs]

        result = Value("row", "logprobs", (rows, row_tokens), torch.float32)
        graph = capture(function, [operand.empty() for operand in operands], self._device)
        return Program("reference" if frozen else "logprobs", graph, tuple(operands), (result,))

    def backward(self, rows: int, row_tokens: int, *, reference: bool = False) -> Program:
        """The gradients and what a micro-batch adds to them, and the statistics of its loss (scalars, by `Tally`'s names);
        with `reference` the rows hold the reference policy's log-probabilities."""
        gradients = [replace(parameter, kind="gradient") for parameter in self.parameters]
        names = [field.name for field in fields(PackedBatch) if reference or field.name != "reference_logprobs"]
        operands = [
            *self.parameters,
            *gradients,
            *self._buffers,
            *_row_values(rows, row_tokens, names),
            Value("row", WEIGHTS, (rows, row_tokens), torch.float32),
        ]
        statistics: list[str] = []

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = Operands(
                operands, [t.requires_grad_(o.kind == "parameter") for o, t in zip(operands, tensors, strict=True)]
            )
            tally = Tally()
            with self._computing(given):
                loss = microbatch_loss(
                    self._policy,
                    given.rows(),
                    given.all["row"][WEIGHTS],
                    self._loss,
                    self._distribution,
                    self._algorithm,
                    tally,
                )
            found = torch.autograd.grad(loss, list(given.all["parameter"].values()))
            entries = tally.entries()
            statistics[:] = entries
            sums = map(accumulate, given.all["gradient"].values(), found)
            return [*sums, *entries.values()]

        graph = capture(function, [operand.empty() for operand in operands], self._device)
        scalars = [Value("scalar", name, (), torch.float32) for name in statistics]
        return Program("backward", graph, tuple(operands), (*gradients, *scalars))

    def update(self) -> Program:
        """Clipping, the optimizer's step, and the norm of the gradient (scalar `grad_norm`). Nothing changes where the norm
        is not finite or the scalar `apply` is 0; the gradients are zero afterwards."""
        optimizer = GraphOptimizer(self._policy.model, self.layout, self._optimizer, self._sharding)
        gradients = [replace(parameter, kind="gradient") for parameter in self.parameters]
        moments = list(_values("moment", optimizer.moments(self.parameters)))
        scalars = [Value("scalar", name, (), torch.float32) for name in ("learning_rate", "apply")]
        operands = [*self.parameters, *gradients, *moments, *scalars]

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = Operands(operands, tensors).all
            norm, parameters, moments = optimizer.step(
                given["parameter"], given["gradient"], given["moment"], **given["scalar"]
            )
            zeros = [torch.zeros_like(gradient) for gradient in given["gradient"].values()]
            return [*parameters.values(), *zeros, *moments.values(), norm]

        graph = capture(function, [operand.empty() for operand in operands], self._device)
        norm = Value("scalar", "grad_norm", (), torch.float32)
        return Program("update", graph, tuple(operands), (*self.parameters, *gradients, *moments, norm))

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor called `name`, or of a rank's share of it, where one parameter has this shape."""
        rows = self._sharding.share(shape[0]) if self._sharding else shape[0]
        layers = (len(self.layout.names[name]),) if self.layout.is_stack(name) else ()
        return (*layers, rows, *shape[1:])

    def _weights(self, frozen: bool) -> Sequence[Value]:
        return [replace(parameter, dtype=self._dtype) for parameter in self.parameters] if frozen else self.parameters

    def _computing(self, given: Operands):
        return stacked(
            self._policy.model,
            self.layout,
            given.all["parameter"],
            given.all["buffer"],
            partial(self._sharding.unshard if self._sharding else _unshard, dtype=self._dtype),
        )


WEIGHTS = "weights"
"""Name of what every token's loss is multiplied with."""
INTEGERS = ("input_ids", "positions", "segment_ids", "prefix_ids", "sample_ids", "labels")
LABELS = (*INTEGERS, "loss_mask", "sampler_logprobs", "old_logprobs", "advantages")


class Operands:
    """Tensors by kind and name."""

    def __init__(self, values: Sequence[Value], tensors: Sequence[torch.Tensor]):
        self.all: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in ("parameter", "buffer", "row")}
        for value, tensor in zip(values, tensors, strict=True):
            self.all.setdefault(value.kind, {})[value.name] = tensor

    def rows(self) -> PackedBatch:
        return PackedBatch(**{name: tensor for name, tensor in self.all["row"].items() if name != WEIGHTS})


def _unshard(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return unshard(parameter, name, dtype)


def _values(kind: Kind, tensors: Mapping[str, torch.Tensor]):
    return (Value(kind, name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def _row_values(rows: int, row_tokens: int, names: Sequence[str]) -> list[Value]:
    return [
        Value("row", name, (rows, row_tokens), torch.int64 if name in INTEGERS else torch.float32) for name in names
    ]
