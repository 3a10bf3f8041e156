"""The delta codec: exact for all bits, small after a real optimizer step, and never more than what it should write."""

from __future__ import annotations

import pytest
import torch
from disk_processes import steps
from sync_processes import bits
from tiny_qwen3 import tiny_config

from weight_sync import WeightSyncError, delta


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def packed(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("name", list(steps(0)))
def test_every_dtype_comes_back_exactly(name):
    old, new = steps(0)[name], steps(1)[name]
    data = delta.encode(flat(old), flat(new), old.itemsize)
    if data is None:
        assert bits(old) == bits(new)
        return
    target = torch.empty_like(flat(old))
    delta.apply(packed(data), flat(old), target, old.itemsize)
    assert bits(target) == bits(new)
    in_place = flat(old).clone()
    delta.apply(packed(data), in_place, in_place, old.itemsize)
    assert bits(in_place) == bits(new)


def test_equal_tensors_have_no_delta():
    nan = torch.tensor([float("nan"), 1.0])
    assert delta.encode(flat(nan), flat(nan.clone()), 4) is None
    assert delta.encode(flat(torch.tensor([0.0])), flat(torch.tensor([-0.0])), 4) is not None


@pytest.mark.parametrize("change", [lambda n: n - 8, lambda n: n + 8, lambda n: 0])
def test_a_delta_of_another_size_is_refused(change):
    old = torch.zeros(64, dtype=torch.uint8)
    data = packed(delta.encode(old, old + 1, 2))
    other = torch.zeros(change(64), dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="a delta"):
        delta.apply(data, other, other, 2)


def test_every_flipped_bit_of_a_delta_is_seen():
    old, new = flat(steps(0)["model.embed_tokens.weight"]), flat(steps(1)["model.embed_tokens.weight"])
    data = delta.encode(old, new, 2)
    unseen = []
    for byte in range(0, len(data), 13):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << (byte % 8)
        target = torch.empty_like(old)
        try:
            delta.apply(packed(damaged), old, target, 2)
        except WeightSyncError:
            continue
        if not torch.equal(target, new):
            unseen.append(byte)
    assert unseen == []


def test_a_real_step_at_1e_6_is_a_few_percent_of_the_policy():
    """AdamW on fp32 masters, bf16 published: the wire carries a small share of the bytes."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(512, tied=True)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = [parameter.detach().bfloat16() for parameter in model.parameters()]
    ids = torch.randint(0, 512, (4, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    sizes = []
    for old, parameter in zip(before, model.parameters(), strict=True):
        data = delta.encode(flat(old), flat(parameter.bfloat16()), 2)
        sizes.append((len(data or b""), old.nbytes))
    share = sum(size for size, _ in sizes) / sum(nbytes for _, nbytes in sizes)
    assert 0.001 < share < 0.1
