"""The weights that turn the losses of tokens into one number.

They are made once for a whole minibatch, before it is cut into ranks and micro-batches: the loss is the plain sum of
weight * loss over all of them, so its gradient does not depend on how the minibatch is cut.
"""

from __future__ import annotations

from typing import Literal

import torch


def token_weights(
    mask: torch.Tensor,
    sample_ids: torch.Tensor,
    aggregation: Literal["token_mean", "sample_mean", "constant_length"],
    max_response_tokens: int | None = None,
) -> torch.Tensor:
    """Weight of every token of a minibatch, [R, L] float32; 0 outside the mask.

    token_mean       every token counts the same: 1 / tokens (DAPO, arXiv 2503.14476, section 3.3)
    sample_mean      every sample counts the same, its tokens share alike: 1 / (samples * tokens of the sample) (GRPO,
                     arXiv 2402.03300, eq. 3); a sample without a token under the mask does not count
    constant_length  1 / (samples * max_response_tokens) (Dr. GRPO, arXiv 2503.20783, section 3.2); every sample
                     counts, one without a token under the mask too: the divisor does not depend on what was written

    The first two add up to 1, to 0 where no token is under the mask.

    mask                 [R, L]  1 where a token enters the loss
    sample_ids           [R, L]  1, 2, ... per sample of the minibatch, 0 for padding and shared prompts
    max_response_tokens          the longest response that can be; for constant_length alone
    """
    inside = (mask > 0).float()
    if aggregation == "token_mean":
        return inside / inside.sum().clamp(min=1)
    if aggregation == "sample_mean":
        tokens = sample_sums(inside, sample_ids)
        samples = (tokens > 0).sum()
        return inside / (tokens[sample_ids].clamp(min=1) * samples.clamp(min=1))
    if aggregation == "constant_length":
        if max_response_tokens is None:
            raise ValueError("constant_length needs max_response_tokens")
        samples = (sample_sums(torch.ones_like(inside), sample_ids)[1:] > 0).sum()
        return inside / (samples.clamp(min=1) * max_response_tokens)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def sample_sums(values: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
    """Sums over each sample, [1 + highest sample id]; index 0 collects what belongs to no sample.

    Its size depends on the ids: it belongs outside of compiled code.
    """
    sums = values.new_zeros(int(sample_ids.max()) + 1 if sample_ids.numel() else 1)
    return sums.scatter_add_(0, sample_ids.flatten(), values.flatten())
