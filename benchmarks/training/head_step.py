"""The output layer at a large vocabulary: log-probabilities and entropies of 4,096 tokens, forward and backward.

`ours` is the trainer's head, which never holds the logits whole; `plain` is what one would write: all logits, their
log-softmax, the labels picked out of it, and the entropy.
"""

from __future__ import annotations

import torch
from workload import arguments, measure

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.logprobs import hidden_logprobs

TOKENS, HIDDEN, VOCABULARY = 4096, 1024, 151_936


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(hidden @ weight.t(), -1)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden_logprobs(hidden, weight, labels, Distribution())


def main() -> None:
    parser = arguments()
    parser.add_argument("--path", choices=["plain", "ours"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    upstream = torch.randn(TOKENS)
    path = {"plain": plain, "ours": ours}[options.path]

    def step() -> float:
        logprobs, _ = path(hidden, weight, labels)
        (logprobs * upstream).sum().backward()
        norm = float(weight.grad.norm())
        hidden.grad = weight.grad = None
        return norm

    measure(step, options, tokens=TOKENS)


if __name__ == "__main__":
    main()
