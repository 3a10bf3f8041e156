"""MurmurHash3 (x86, 32 bit) of (seed, position, column), the source of randomness of SGLang's seeded sampling."""

from __future__ import annotations

import numpy as np
import torch


def _rotate(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _absorb(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    word = _rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash every (row, column) pair: ``seed`` and ``positions`` [n], ``col_indices`` [m] -> [n, m] int64 below 2**32.

    The key is 16 bytes, little endian: 8 of the row's seed, 4 of its position, 4 of the column; the hash's own seed is 0.
    Same numbers as SGLang's kernel ``murmur_hash32``; algorithm by Austin Appleby (public domain).
    """
    low, high = seed.to(torch.int64).numpy().astype(np.int64).view(np.uint32).reshape(-1, 2).T
    state = np.zeros_like(low)
    for word in (low, high, positions.numpy().astype(np.uint32)):
        state = _absorb(state, word)
    state = _absorb(state[:, None], col_indices.numpy().astype(np.uint32)[None, :])
    state ^= np.uint32(16)  # length of the key in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state ^= state >> np.uint32(shift)
        state *= np.uint32(factor)
    state ^= state >> np.uint32(16)
    return torch.from_numpy(state.astype(np.int64))
