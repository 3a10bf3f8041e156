"""Every kind of copy against torch's own, with hashes against one pass over the result."""

from __future__ import annotations

import pytest
import sync_processes as sp
import torch
import xxhash

from weight_sync.shared_memory import copying
from weight_sync.shared_memory.copying import Copy, copy_tensors


def sources() -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    plain = {name: (tensor, tensor.dtype) for name, tensor in sp.policy(3).items()}
    return plain | {
        "transposed": (torch.randn(37, 53).t(), torch.float32),
        "every other": (torch.randn(101, 6)[::2], torch.float32),
        "converted": (torch.randn(301, 7), torch.bfloat16),
        "converted scalar": (torch.tensor(3.0), torch.bfloat16),
        "converted, empty": (torch.empty(0, 4), torch.bfloat16),
        "expanded": (torch.randn(1, 5).expand(70, 5), torch.float32),
    }


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("piece_bytes", [64, 1000, 1 << 20])
def test_copies_and_hashes(monkeypatch, piece_bytes, threads):
    monkeypatch.setattr(copying, "CACHED_BYTES", piece_bytes)
    monkeypatch.setattr(copying, "PIECE_BYTES", 2 * piece_bytes)
    copies = [
        Copy(name, torch.empty(source.shape, dtype=dtype), source, to_hash=name != "transposed")
        for name, (source, dtype) in sources().items()
    ]
    hashed = copy_tensors(copies, threads)
    for name, target, source, _ in copies:
        assert sp.bits(target) == sp.bits(torch.empty_like(target).copy_(source)), name
        if name in hashed:
            assert hashed[name] == xxhash.xxh3_128(sp.bits(target)).hexdigest(), name
    fair_share = sum(copy.target.nbytes for copy in copies) / threads
    assert hashed.keys() == {copy.name for copy in copies if copy.to_hash and copy.target.nbytes <= fair_share}


def test_a_region_of_a_larger_tensor():
    whole, source = torch.zeros(50, 40), torch.randn(50, 13)
    assert copy_tensors([Copy("w", whole[:, 20:33], source, to_hash=False)], 2) == {}
    assert torch.equal(whole[:, 20:33], source)
    assert whole[:, :20].count_nonzero() == whole[:, 33:].count_nonzero() == 0
