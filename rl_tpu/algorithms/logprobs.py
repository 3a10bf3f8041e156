"""Log-probabilities and entropies from logits, without a second copy of the logits.

With a vocabulary of 150,000 the logits of one long row take gigabytes, and a plain log_softmax in float32 several times
that. Here they are walked through in chunks, forwards and backwards; only their own dtype's copy and its gradient exist.
"""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 1 << 26
"""Logits worked on at a time (256 MiB in float32)."""


def label_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every label and entropy of every distribution softmax(logits / temperature).

    logits  [R, L, V]  any floating dtype; computed in float32
    labels  [R, L]     a negative label has log-probability 0 and no gradient
    returns [R, L] and [R, L], float32; the entropy is a statistic and carries no gradient
    """
    return _LabelLogprobs.apply(logits, labels, temperature, max(1, chunk_elements // logits.shape[-1]))


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, chunk_rows):
        logprobs, entropies = [], []
        for part, label in zip(logits.flatten(0, 1).split(chunk_rows), labels.flatten().split(chunk_rows), strict=True):
            table = torch.log_softmax(part.float() / temperature, -1)
            chosen = table.gather(-1, label.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            logprobs.append(torch.where(label >= 0, chosen, 0.0))
            entropies.append(-(table.exp() * table).sum(-1))
        ctx.save_for_backward(logits, labels)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        entropy = torch.cat(entropies).view_as(labels)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs).view_as(labels), entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _):
        logits, labels = ctx.saved_tensors
        # d logprob / d logit = (1 at the label, else 0, minus the probability) / temperature
        scale = torch.where(labels >= 0, grad_logprobs, 0.0) / ctx.temperature
        gradients = torch.empty_like(logits)
        wholes = (logits.flatten(0, 1), labels.flatten(), scale.flatten(), gradients.flatten(0, 1))
        for part, label, by, into in zip(*(whole.split(ctx.chunk_rows) for whole in wholes), strict=True):
            gradient = torch.softmax(part.float() / ctx.temperature, -1).mul_(-by.unsqueeze(-1))
            into.copy_(gradient.scatter_add_(-1, label.clamp(min=0).unsqueeze(-1), by.unsqueeze(-1)))
        return gradients, None, None, None
