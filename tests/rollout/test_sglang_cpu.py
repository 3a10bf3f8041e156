"""Our SGLang platform, as far as it can be seen without a server."""

from __future__ import annotations

import subprocess
import sys

import torch

from rl_tpu.rollout.sglang_cpu.murmur import murmur_hash32


def murmur3(key: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of a key of whole words, in plain integers."""
    mask, state = 0xFFFFFFFF, 0
    for start in range(0, len(key), 4):
        word = int.from_bytes(key[start : start + 4], "little") * 0xCC9E2D51 & mask
        word = ((word << 15 | word >> 17) & mask) * 0x1B873593 & mask
        state ^= word
        state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
    state ^= len(key)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_the_plain_hash_agrees_with_published_values():
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B


def test_murmur_hash_of_seed_position_and_column():
    seeds = torch.tensor([0, 1, 42, 2**62 + 12345, 2**63 - 1, -1], dtype=torch.int64)
    positions = torch.tensor([0, 1, 7, 2**31 - 1, 100, 3], dtype=torch.int64)
    columns = torch.tensor([0, 1, 2, 319, 151935])
    hashed = murmur_hash32(seeds, positions, columns)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column, index in enumerate(columns.tolist()):
            key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(4, "little") + index.to_bytes(4, "little")
            assert hashed[row, column].item() == murmur3(key)
    assert torch.equal(hashed, murmur_hash32(seeds.to(torch.uint64), positions, columns))


def test_importing_the_entry_points_is_cheap_and_harmless():
    """Other programs that start SGLang in this environment call them, too."""
    code = """
import os, sys
from rl_tpu.rollout import sglang_cpu
assert sglang_cpu.activate() is None
sglang_cpu.register_hooks()
assert not {"torch", "sglang", "ray"} & set(sys.modules), sorted(sys.modules)
assert not [finder for finder in sys.meta_path if "rl_tpu" in type(finder).__module__]
os.environ["SGLANG_PLATFORM"] = "rl_tpu_cpu"
assert sglang_cpu.activate() == "rl_tpu.rollout.sglang_cpu.platform.CpuPlatform"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
