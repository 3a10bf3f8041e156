"""The delta codec: exact for all bits, small after a real optimizer step, and never more than what it should write."""

from __future__ import annotations

import pytest
import torch
from disk_processes import steps
from sync_processes import bits
from tiny_qwen3 import tiny_config

from weight_sync import WeightSyncError
from weight_sync.disk import delta


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def encode(old: torch.Tensor, new: torch.Tensor, itemsize: int) -> bytes | None:
    parts = delta.chunks(len(old))
    return delta.join([delta.encode_chunk(old[part], new[part], itemsize) for part in parts])


def apply(data: bytes, base: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    frames = delta.split(torch.frombuffer(bytearray(data), dtype=torch.uint8), len(base))
    for frame, part in zip(frames, delta.chunks(len(base)), strict=True):
        delta.apply_chunk(frame, base[part], target[part], itemsize)


@pytest.fixture(params=["chunks", "one chunk"], autouse=True)
def small_chunks(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr(delta, "CHUNK_BYTES", 64)


@pytest.mark.parametrize("name", list(steps(0)))
def test_every_dtype_comes_back_exactly(name):
    old, new = steps(0)[name], steps(1)[name]
    data = encode(flat(old), flat(new), old.itemsize)
    if data is None:
        assert bits(old) == bits(new)
        return
    target = torch.empty_like(flat(old))
    apply(data, flat(old), target, old.itemsize)
    assert bits(target) == bits(new)
    in_place = flat(old).clone()
    apply(data, in_place, in_place, old.itemsize)
    assert bits(in_place) == bits(new)


def test_equal_tensors_have_no_delta():
    nan = torch.tensor([float("nan"), 1.0])
    assert encode(flat(nan), flat(nan.clone()), 4) is None
    assert encode(flat(torch.tensor([0.0])), flat(torch.tensor([-0.0])), 4) is not None


@pytest.mark.parametrize("size", [0, 56, 120, 136, 192])
def test_a_delta_of_another_size_is_refused(size):
    old = torch.zeros(128, dtype=torch.uint8)
    data = encode(old, old + 1, 2)
    other = torch.zeros(size, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="a delta"):
        apply(data, other, other, 2)


def test_a_flipped_bit_of_a_delta_never_gives_other_bytes_unseen():
    """Either it is refused, or, where it does not matter, the right bytes come out."""
    old, new = flat(steps(0)["model.layers.0.mlp.up_proj.weight"]), flat(steps(1)["model.layers.0.mlp.up_proj.weight"])
    data = encode(old, new, 2)
    refused = 0
    for byte in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << (byte % 8)
        target = torch.empty_like(old)
        try:
            apply(damaged, old, target, 2)
        except WeightSyncError:
            refused += 1
        else:
            assert torch.equal(target, new)
    assert refused > 0.9 * len(range(0, len(data), 7))


def test_a_real_step_at_1e_6_is_a_few_percent_of_the_policy(monkeypatch):
    """AdamW on fp32 masters, bf16 published: the wire carries a small share of the bytes."""
    from transformers import Qwen3ForCausalLM

    monkeypatch.undo()  # chunks of their normal size

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(512, tied=True)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = [parameter.detach().bfloat16() for parameter in model.parameters()]
    ids = torch.randint(0, 512, (4, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    sizes = []
    for old, parameter in zip(before, model.parameters(), strict=True):
        data = encode(flat(old), flat(parameter.bfloat16()), 2)
        sizes.append((len(data or b""), old.nbytes))
    share = sum(size for size, _ in sizes) / sum(nbytes for _, nbytes in sizes)
    assert 0.001 < share < 0.1
