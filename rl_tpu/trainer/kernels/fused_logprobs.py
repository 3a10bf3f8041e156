"""Output layer, softmax, log-probabilities and entropies as one operator, which never holds the logits.

On a TPU it is a Pallas kernel (rl_tpu/tpu/kernels/fused_logprobs.py). Here it is plain PyTorch, tile by tile as the kernel
works: a block of tokens by a block of the vocabulary. In contrast to `hidden_logprobs`, logits of bfloat16 hidden states
are not rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

LEAST = -1e30
"""Less than any logit, and finite."""


@torch.library.custom_op("rl_tpu::fused_logprobs", mutates_args=())
def fused_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    block_tokens: int,
    block_vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of every label and entropy of every distribution softmax(hidden @ weight.T / temperature), and the
    logarithm of its normaliser, which carries no gradient. Each is [N], float32 (float64 for float64).

    hidden            [N, D]
    weight            [V, D]  in hidden's type
    labels            [N]     a negative label has log-probability 0, and its place no gradient
    block_tokens,     tile sizes; N and V need not be multiples
    block_vocabulary
    """
    found = [
        _statistics(states, weight, places, temperature, block_vocabulary)
        for states, places in zip(hidden.split(block_tokens), labels.split(block_tokens), strict=True)
    ]
    maximum, total, product, chosen = map(torch.cat, zip(*found, strict=True))
    spread = torch.log(total)
    normalizer = maximum + spread
    return torch.where(labels >= 0, chosen - normalizer, 0.0), spread - product / total, normalizer


@fused_logprobs.register_fake
def _(hidden, weight, labels, temperature, block_tokens, block_vocabulary):
    return tuple(hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(3))


@torch.library.custom_op("rl_tpu::fused_logprobs_backward", mutates_args=())
def fused_logprobs_backward(
    logprob_gradient: torch.Tensor,
    entropy_gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    entropy: torch.Tensor,
    normalizer: torch.Tensor,
    temperature: float,
    block_tokens: int,
    block_vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of hidden and weight, in their types, from those of the log-probabilities and of the entropies, [N] each.

    The gradient of a tile of logits is rounded to hidden's type; what is made of it is summed in at least float32.
    """
    of_logprob = torch.where(labels >= 0, logprob_gradient, 0.0) / temperature
    wholes = (hidden, labels, of_logprob, entropy_gradient / temperature, entropy, normalizer)
    into_weight = torch.zeros_like(weight, dtype=_wide(weight))
    into_hidden = []
    for states, places, *known in zip(*(whole.split(block_tokens) for whole in wholes), strict=True):
        total = torch.zeros_like(states, dtype=_wide(states))
        for first, rows in _blocks(weight, block_vocabulary):
            gradient = _logit_gradient(_logits(states, rows, temperature), places - first, *known)
            gradient = gradient.to(states.dtype).to(total.dtype)
            total.addmm_(gradient, rows.to(total.dtype))
            into_weight[first : first + len(rows)].addmm_(gradient.T, states.to(total.dtype))
        into_hidden.append(total.to(states.dtype))
    return torch.cat(into_hidden), into_weight.to(weight.dtype)


@fused_logprobs_backward.register_fake
def _(logprob_gradient, entropy_gradient, hidden, weight, *_):
    return tuple(each.new_empty(each.shape) for each in (hidden, weight))


def _keep(ctx, inputs, output):
    hidden, weight, labels, *ctx.numbers = inputs
    _, entropy, normalizer = output
    ctx.mark_non_differentiable(normalizer)
    ctx.save_for_backward(hidden, weight, labels, entropy, normalizer)


def _gradients(ctx, logprob_gradient, entropy_gradient, _):
    found = fused_logprobs_backward(logprob_gradient, entropy_gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, None, None, None


fused_logprobs.register_autograd(_gradients, setup_context=_keep)


def _statistics(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, block: int
) -> tuple[torch.Tensor, ...]:
    """Of the logits z, [n] each: the largest m, sum exp(z - m), sum exp(z - m) * (z - m), and the label's."""
    maximum = torch.full(labels.shape, LEAST, dtype=_wide(hidden), device=hidden.device)
    total, product, chosen = (torch.zeros_like(maximum) for _ in range(3))
    for first, rows in _blocks(weight, block):
        logits = _logits(hidden, rows, temperature)
        place, own = _among(labels - first, logits)
        chosen += torch.where(own, logits.gather(1, place), 0.0).squeeze(1)
        largest = torch.maximum(maximum, logits.amax(1))
        below = maximum - largest
        share = below.exp()
        powers = logits.sub_(largest.unsqueeze(1)).exp()
        product = share * (product + below * total) + torch.linalg.vecdot(powers, logits)
        total = share * total + powers.sum(1)
        maximum = largest
    return maximum, total, product, chosen


def _logit_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    of_logprob: torch.Tensor,
    of_entropy: torch.Tensor,
    entropy: torch.Tensor,
    normalizer: torch.Tensor,
) -> torch.Tensor:
    """With p the probabilities, d logprob / d logit = (1 at the label, else 0, minus p) and
    d entropy / d logit = -p * (log p + entropy), each times the gradient that came for it. In place of the logits."""
    of_logprob, of_entropy, entropy, normalizer = (
        each.unsqueeze(1) for each in (of_logprob, of_entropy, entropy, normalizer)
    )
    table = logits.sub_(normalizer)
    probability = table.exp()
    gradient = table.add_(entropy).mul_(of_entropy).add_(of_logprob).mul_(probability).neg_()
    place, own = _among(labels, gradient)
    return gradient.scatter_add_(1, place, torch.where(own, of_logprob, 0.0))


def _logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = _wide(hidden)
    return hidden.to(wide) @ rows.to(wide).T / temperature


def _blocks(weight: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The first row's number, and the rows."""
    return ((number * size, rows) for number, rows in enumerate(weight.split(size)))


def _among(places: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1]: the places among these logits' columns (some column, if they are not), and whether they are."""
    own = (places >= 0) & (places < logits.shape[1])
    return torch.where(own, places, 0).unsqueeze(1), own.unsqueeze(1)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
