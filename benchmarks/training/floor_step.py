"""A training step by hand on transformers' Qwen3, with nothing around it: the bound that a trainer is measured against.

Forward, backward and AdamW with the clipped loss, logits for the response tokens alone. `padded` lays the samples in
micro-batches, in W2 sorted by length and padded to the longest of theirs. `packed` lays them side by side in rows of
`--micro` samples and attends inside each sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, Qwen3ForCausalLM
from workload import BETAS, CLIP_HIGH, CLIP_LOW, LEARNING_RATE, MAX_GRAD_NORM, Answer, arguments, batch, measure, tokens

Chunk = tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs of the model, where its output predicts a response token [n], that token [n], its advantage [n]."""


def predictions(answer: Answer, start: int) -> range:
    """Positions that predict the response of a sample that starts at `start`."""
    first = start + len(answer.prompt) - 1
    return range(first, first + len(answer.response))


def padded(answers: list[Answer], micro: int) -> Iterator[Chunk]:
    for begin in range(0, len(answers), micro):
        part = answers[begin : begin + micro]
        longest = max(len(answer.prompt) + len(answer.response) for answer in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        for row, answer in enumerate(part):
            ids[row, : len(answer.prompt) + len(answer.response)] = torch.tensor(answer.prompt + answer.response)
        # Padding stands at the end: causal attention never reaches it, so no mask is needed.
        starts = range(0, len(part) * longest, longest)
        yield {"input_ids": ids}, *targets(part, starts)


def packed(answers: list[Answer], micro: int) -> Iterator[Chunk]:
    for begin in range(0, len(answers), micro):
        part = answers[begin : begin + micro]
        lengths = [len(answer.prompt) + len(answer.response) for answer in part]
        ids = torch.tensor([token for answer in part for token in answer.prompt + answer.response])
        positions = torch.cat([torch.arange(length) for length in lengths])
        starts = [sum(lengths[:index]) for index in range(len(part))]
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "lengths": lengths}
        yield inputs, *targets(part, starts)


def targets(part: list[Answer], starts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where = torch.tensor([at for answer, start in zip(part, starts, strict=True) for at in predictions(answer, start)])
    labels = torch.tensor([token for answer in part for token in answer.response])
    return where, labels, torch.tensor([answer.advantage for answer in part for _ in answer.response])


def attention_per_sample(module, query, key, value, mask, lengths, scaling=None, **_):
    """Attention of one row [1, heads, tokens, head size] inside samples of `lengths` tokens."""
    if len(set(lengths)) == 1:  # one call for all: samples become the batch
        parts = [x.unflatten(2, (-1, lengths[0])).transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    samples = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling, enable_gqa=True) for qkv in samples]
    return torch.cat(outs, 2).transpose(1, 2), None


def main() -> None:
    parser = arguments()
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded")
    parser.add_argument("--micro", type=int, default=16, help="samples in one forward and backward")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    AttentionInterface.register("per_sample", attention_per_sample)
    attention = "per_sample" if options.layout == "packed" else "sdpa"
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation=attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    answers = batch(options.workload)
    predicted = sum(len(answer.response) for answer in answers)
    answers.sort(key=lambda answer: len(answer.response))
    chunks = list({"padded": padded, "packed": packed}[options.layout](answers, options.micro))

    def step() -> float:
        for inputs, where, labels, advantages in chunks:
            hidden = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[where]
            logprobs = -F.cross_entropy(model.lm_head(hidden), labels, reduction="none")
            ratio = torch.exp(logprobs - logprobs.detach())
            loss = (
                -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages).sum()
                / predicted
            )
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    measure(step, options, tokens=tokens(answers), transformers=transformers.__version__)


if __name__ == "__main__":
    main()
