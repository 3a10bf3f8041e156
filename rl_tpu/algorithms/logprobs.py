"""Log-probabilities and entropies from the hidden states before the output layer, without whole logits.

With a vocabulary of 150,000 the logits of a few thousand tokens take gigabytes, and a softmax in float32 several times
that. Here the output layer, the softmax and what is read from it run over a chunk of tokens at a time, and the backward
computes each chunk again (unless there is only one: that one is kept). The vocabulary may be divided among ranks: then
only a few numbers per token travel, and with a truncated distribution the likeliest logits of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from rl_tpu.algorithms.distribution import Distribution

CHUNK_LOGITS = 1 << 24
"""Logits worked on at a time (64 MiB in float32)."""
NEVER = -1e30
"""A logit of probability 0. Finite, so that it times that probability is 0 as well."""


class VocabularyShard(NamedTuple):
    """The rows `offset`, `offset + 1`, ... of the output layer are here; the group's ranks have all `vocabulary` of them
    in order of their rank."""

    offset: int
    vocabulary: int
    group: dist.ProcessGroup


def hidden_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    distribution: Distribution,
    *,
    entropy_gradient: bool = False,
    shard: VocabularyShard | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every label and entropy of every distribution, both [N], at least float32.

    The distribution is that of the logits hidden @ weight.T. Where it is truncated, the label is always kept: another
    policy drew it, and its log-probability is to be finite.

    hidden   [N, D]  any floating dtype; the matrix products run in it, all else in at least float32
    weight   [V, D]  same dtype; with `shard` this rank's rows
    labels   [N]     a negative label has log-probability 0, and its place no gradient
    shard            hidden and labels are the same on all ranks of its group, and so is the result. The gradient of
                     `hidden` is then this rank's part of a sum over the group.
    The entropy carries a gradient only with `entropy_gradient`.
    """
    widest = weight.shape[0] if shard is None else -(-shard.vocabulary // shard.group.size())
    return _HiddenLogprobs.apply(
        hidden, weight, labels, distribution, entropy_gradient, shard, max(1, chunk_logits // widest)
    )


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, distribution, entropy_gradient, shard, chunk):
        head = _Head(weight, distribution, shard)
        tables, found = [], []
        for states, places in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = head.logits(states, places)
            found.append(head.statistics(logits, places))
            if len(hidden) <= chunk:
                tables.append(logits)
        maximum, total, product, chosen = map(torch.cat, zip(*found, strict=True))
        largest = maximum
        if shard is not None:
            largest = all_reduce(maximum, "max", shard.group)
            below = maximum - largest
            share = torch.exp(below)
            parts = torch.stack([share * total, share * (product + below * total), chosen])
            total, product, chosen = all_reduce(parts, "sum", shard.group)
        spread = torch.log(total)
        normalizer, entropy = largest + spread, spread - product / total
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy, maximum, *tables)
        ctx.head, ctx.chunk, ctx.entropy_gradient = head, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return torch.where(labels >= 0, chosen - normalizer, 0.0), entropy

    @staticmethod
    def backward(ctx, logprob_gradient, entropy_gradient):
        hidden, weight, labels, normalizer, entropy, maximum, *tables = ctx.saved_tensors
        logprob_gradient = torch.where(labels >= 0, logprob_gradient, 0.0)
        into_hidden = torch.empty_like(hidden)
        into_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        wholes = (hidden, labels, normalizer, entropy, maximum, logprob_gradient, entropy_gradient, into_hidden)
        for states, places, below, spread, base, of_logprob, of_entropy, into in zip(
            *(whole.split(ctx.chunk) for whole in wholes), strict=True
        ):
            if tables:
                table = tables[0].sub_((below - base).unsqueeze(1))
            else:
                table = ctx.head.logits(states, places).sub_(below.unsqueeze(1))
            through_entropy = (spread, of_entropy) if ctx.entropy_gradient else None
            gradient = ctx.head.logit_gradient(table, places, of_logprob, through_entropy).to(hidden.dtype)
            torch.mm(gradient, weight, out=into)
            if into_weight is not None:
                _add_product(into_weight, gradient.T, states)
        return into_hidden, into_weight if into_weight is None else into_weight.to(weight.dtype), *[None] * 5


class _Head(NamedTuple):
    """The output layer on this rank and the distribution that its logits become. n is the length of a chunk."""

    weight: torch.Tensor
    distribution: Distribution
    shard: VocabularyShard | None

    def logits(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[n, V] of this rank, over the temperature, in at least float32; NEVER where the distribution leaves one out."""
        logits = torch.addmm(
            hidden.new_zeros(1), hidden, self.weight.T, beta=0, alpha=1 / self.distribution.temperature
        )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.distribution.truncated:
            places, own = (tensor.unsqueeze(1) for tensor in self._places(labels))
            chosen = logits.gather(1, places)
            # Of equal logits the label's comes first: it was drawn, so it was among those that were kept.
            logits.scatter_(1, places, torch.where(own, chosen.nextafter(chosen.abs() + 1), chosen))
            left_out = self._left_out(logits)
            left_out.scatter_(1, places, left_out.gather(1, places) & ~own)
            logits.masked_fill_(left_out, NEVER)
        return logits

    def statistics(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of these logits z, [n] each: the largest m, sum exp(z - m), sum exp(z - m) * (z - m), and the label's (0 where
        it is another rank's). In place: they become z - m."""
        places, own = self._places(labels)
        chosen = torch.where(own, logits.gather(1, places.unsqueeze(1)).squeeze(1), 0.0)
        maximum = logits.amax(1)
        powers = logits.sub_(maximum.unsqueeze(1)).exp()
        return maximum, powers.sum(1), torch.linalg.vecdot(powers, logits), chosen

    def logit_gradient(
        self,
        table: torch.Tensor,
        labels: torch.Tensor,
        of_logprob: torch.Tensor,
        through_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """[n, V]: with p = exp(table), d logprob / d logit = (1 at the label, else 0, minus p) / temperature and
        d entropy / d logit = -p * (log p + entropy) / temperature, each times the gradient that came for it (the
        entropy's in `through_entropy`, after the entropy itself). In place of the table."""
        of_logprob = (of_logprob / self.distribution.temperature).unsqueeze(1)
        if through_entropy is None:
            gradient = table.exp_().mul_(-of_logprob)
        else:
            entropy, of_entropy = (number.unsqueeze(1) for number in through_entropy)
            probability = table.exp()
            table.add_(entropy).mul_(of_entropy / self.distribution.temperature).add_(of_logprob)
            gradient = table.mul_(probability).neg_()
        places, own = (tensor.unsqueeze(1) for tensor in self._places(labels))
        return gradient.scatter_add_(1, places, torch.where(own, of_logprob, 0.0))

    def _left_out(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V] bool, as SGLang truncates: of all tokens sorted by probability, those of rank `support` and above,
        those before which more than top_p of the whole distribution lies, and those less likely than min_p times the
        first."""
        support = min(self.distribution.support, self.shard.vocabulary if self.shard else logits.shape[1])
        likeliest, places = logits.topk(min(support, logits.shape[1]))
        normalizer = logits.logsumexp(1, keepdim=True)
        candidates, first = likeliest, 0
        if self.shard:
            candidates, first = gather_uneven(likeliest, self.shard, support)
            normalizer = all_gather(normalizer, self.shard.group).logsumexp(1, keepdim=True)
        descending, order = candidates.sort(dim=1, descending=True, stable=True)
        probability = torch.exp(descending - normalizer)
        kept = probability.cumsum(1) - probability <= self.distribution.top_p
        kept &= probability >= self.distribution.min_p * probability[:, :1]
        kept[:, support:] = False
        kept = torch.empty_like(kept).scatter_(1, order, kept)[:, first : first + likeliest.shape[1]]
        return torch.ones_like(logits, dtype=torch.bool).scatter_(1, places, ~kept)

    def _places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the labels are among this rank's logits (somewhere, if they are not), and whether they are there."""
        places = labels if self.shard is None else labels - self.shard.offset
        own = (labels >= 0) & (places >= 0) & (places < self.weight.shape[0])
        return torch.where(own, places, 0), own


def gather_uneven(likeliest: torch.Tensor, shard: VocabularyShard, support: int) -> tuple[torch.Tensor, int]:
    """[n, k] of every rank side by side, and the column where this rank's begin. Ranks with fewer are filled up."""
    width = min(support, -(-shard.vocabulary // shard.group.size()))
    filled = torch.nn.functional.pad(likeliest, (0, width - likeliest.shape[1]), value=NEVER)
    return all_gather(filled, shard.group), width * shard.group.rank()


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The group's tensors side by side along the last dimension."""
    return functional_collectives.all_gather_tensor(tensor.contiguous(), tensor.dim() - 1, group)


def all_reduce(tensor: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    return functional_collectives.all_reduce(tensor, operation, group)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where `total` may have more digits than they."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
