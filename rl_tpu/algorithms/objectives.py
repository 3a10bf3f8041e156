"""What is made of ratio and advantage: the loss of every token.

An objective is a function of five arguments. It is found by its name or by its import path, so one of your own needs no
change here (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from rl_tpu.algorithms.masked import masked
from rl_tpu.errors import UserError
from rl_tpu.registry import check_options, describe, lookup


class Bounds(NamedTuple):
    """The ratio is bounded by 1 - clip_low and 1 + clip_high, the loss of a negative advantage by dual_clip times it."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None


class Objective(NamedTuple):
    """All [R, L] and 0 outside the mask. The gradient flows through the loss alone."""

    loss: torch.Tensor
    """To be minimised."""
    ratio: torch.Tensor
    """exp(log_ratio)."""
    clipped: torch.Tensor
    """1 where a bound decided the loss."""


ObjectiveFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Bounds], Objective]


def clip(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, bounds: Bounds
) -> Objective:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), with a bound on either side as in DAPO.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); clip_high > clip_low is DAPO's clip-higher
    (arXiv 2503.14476, eq. 10). Where A < 0 and there is a dual_clip c the loss is at most -c * A
    (arXiv 1912.09729). Where a bound decided the loss there is no gradient.

    log_ratio   [R, L]  of token or sequence (`rl_tpu.algorithms.ratios`), with gradient
    logprobs    [R, L]  of the policy being trained; not looked at
    advantages  [R, L]
    mask        [R, L]  1 where a token enters the loss
    """
    ratio, advantages = log_ratio.exp(), masked(advantages, mask)
    plain = -ratio * advantages
    bounded = -ratio.detach().clamp(1 - bounds.clip_low, 1 + bounds.clip_high) * advantages
    clipped = bounded > plain
    loss = torch.where(clipped, bounded, plain)
    if bounds.dual_clip is not None:
        most = -bounds.dual_clip * advantages
        too_much = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(too_much, most, loss), clipped | too_much
    return _under(mask, loss, ratio, clipped)


def cispo(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, bounds: Bounds
) -> Objective:
    """A bounded weight on the log-probability (CISPO, arXiv 2506.13585, eq. 4 and 5): no token loses its gradient.

    loss = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob. The paper bounds the weight above
    only: clip_low = 1. `clipped` is 1 where the weight was bounded; dual_clip has no meaning here.

    log_ratio   [R, L]  of token or sequence; its gradient is not used
    logprobs    [R, L]  of the policy being trained; the gradient flows through these alone
    advantages  [R, L]
    mask        [R, L]  1 where a token enters the loss
    """
    ratio, advantages = log_ratio.detach().exp(), masked(advantages, mask)
    weight = ratio.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    return _under(mask, -weight * advantages * logprobs, ratio, weight != ratio)


def _under(mask: torch.Tensor, loss: torch.Tensor, ratio: torch.Tensor, clipped: torch.Tensor) -> Objective:
    return Objective(masked(loss, mask), masked(ratio.detach(), mask), masked(clipped.to(ratio.dtype), mask))


OBJECTIVES = {
    "clip": "rl_tpu.algorithms.objectives:clip",
    "cispo": "rl_tpu.algorithms.objectives:cispo",
}
"""Known objectives, by name, and where they are."""


def find_objective(name: str) -> ObjectiveFunction:
    """The objective called `name` in OBJECTIVES, or the one at an import path `package.module:function`.

    It is tried on two tokens. Raises UserError for a name or path that leads nowhere, a function that cannot be called
    with the five arguments, raises, returns no `Objective` of the rows' shape, has no gradient, or a loss outside the
    mask.
    """
    function = lookup("objective", name, OBJECTIVES)
    check_options("objective", name, function, ("log_ratio", "logprobs", "advantages", "mask", "bounds"), {})
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    try:
        found = function(logprobs + 1, logprobs, torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), Bounds(0.2, 0.2))
    except Exception as error:
        raise UserError(f"objective {name!r}, tried on two tokens: {describe(error)}") from error
    if not isinstance(found, Objective):
        raise UserError(f"objective {name!r} returned a {type(found).__name__}, not an Objective(loss, ratio, clipped)")
    shapes = [tuple(part.shape) for part in found]
    if shapes != [(1, 2)] * 3:
        raise UserError(f"objective {name!r}: loss, ratio and clipped of rows [1, 2] have the shapes {shapes}")
    if not found.loss.requires_grad:
        raise UserError(f"objective {name!r}: its loss has no gradient to log_ratio or logprobs")
    if (outside := found.loss.detach()[0, 1].item()) != 0:
        raise UserError(f"objective {name!r}: the loss of a token outside the mask is {outside}, not 0")
    return function
