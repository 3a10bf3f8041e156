"""Decoding attention of the CPU platform beside the formula, one request at a time in float64."""

from __future__ import annotations

import pytest
import torch

from rl_tpu.rollout.sglang_cpu.attention import MOST_PADDING, chunks, decode

SIZE, SLOTS, CACHE = 16, 40, 3000


def formula(query, keys, values, scaling, window):
    """One request: query [heads, size], keys and values [tokens, key-value heads, size]."""
    shared = query.shape[0] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(shared, 1) for each in (keys, values))
    scores = torch.einsum("hd,thd->ht", query.double(), keys) * scaling
    if window is not None:
        scores[:, : max(0, len(keys) - 1 - window)] = -torch.inf
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (4, 4)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_decode_is_attention_over_a_request_s_own_tokens(heads, key_heads, window, dtype, tolerance):
    torch.manual_seed(0)
    lengths = torch.tensor([1, 200, 2, 61, 90, 64, 3, 75, 150, 7])
    keys, values = (torch.randn(CACHE, key_heads, SIZE).to(dtype) for _ in range(2))
    slots = torch.randperm(SLOTS)[: len(lengths)]
    # What a slot holds beyond its tokens was written by earlier requests and may be no place at all.
    req_to_token = torch.full((SLOTS, 256), CACHE + 5, dtype=torch.int32)
    places = torch.randperm(CACHE)[: lengths.sum()].split(lengths.tolist())
    for slot, place, length in zip(slots, places, lengths, strict=True):
        req_to_token[slot, :length] = place
    query = torch.randn(len(lengths), heads, SIZE).to(dtype)
    output = torch.empty_like(query)
    decode(
        None, None, query, output, keys, values, req_to_token, slots, lengths, scaling=0.3, sliding_window_size=window
    )
    for row, place in enumerate(places):
        expected = formula(query[row], keys[place], values[place], 0.3, window)
        torch.testing.assert_close(output[row].double(), expected, atol=tolerance, rtol=tolerance)


def test_chunks_hold_every_request_once_and_little_padding():
    lengths = torch.randint(1, 2000, (300,), generator=torch.Generator().manual_seed(0))
    found = chunks(lengths, most_tokens=4000)
    assert sorted(torch.cat([chosen for chosen, _ in found]).tolist()) == list(range(300))
    for chosen, longest in found:
        assert longest == lengths[chosen].max()
        assert longest <= max(64, MOST_PADDING * lengths[chosen].min())
        assert len(chosen) == 1 or len(chosen) * longest <= 4000


def test_a_model_with_an_encoder_is_left_to_sglang():
    seen = []
    tensors = [torch.zeros(2, 4, SIZE), torch.zeros(2, 4, SIZE), *(torch.zeros(9, 2, SIZE) for _ in range(2))]
    lengths = torch.tensor([1, 1])
    places = torch.zeros(2, 4, dtype=torch.int32)

    def one_by_one(*arguments):
        seen.append(arguments)
        return "result"

    encoder = torch.tensor([3, 3])
    result = decode(
        one_by_one, "backend", *tensors, places, torch.arange(2), lengths, encoder, scaling=0.3, is_cross_attn=True
    )
    assert result == "result"
    [arguments] = seen
    assert arguments[0] == "backend"
    assert arguments[7] is lengths
    assert arguments[8] is encoder
    assert arguments[9:] == (0.3, False, False, True, None)
