"""MurmurHash3 (x86, 32 bit) of (seed, position, column), the source of randomness of SGLang's seeded sampling."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def _multiply(x: torch.Tensor, factor: int) -> torch.Tensor:
    # int64 products may wrap; their low 32 bits, which are all the hash uses, stay right.
    return (x * factor) & _MASK


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _absorb(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate(state ^ word, 13), 5) + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash every (row, column) pair: ``seed`` and ``positions`` [n], ``col_indices`` [m] -> [n, m] int64 below 2**32.

    The key is 16 bytes, little endian: 8 of the row's seed, 4 of its position, 4 of the column; the hash's own seed is 0.
    Same numbers as SGLang's kernel ``murmur_hash32``; algorithm by Austin Appleby (public domain).
    """
    seed, positions, col_indices = (x.to(torch.int64) for x in (seed, positions, col_indices))
    state = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, positions & _MASK):
        state = _absorb(state, word)
    state = _absorb(state[:, None], (col_indices & _MASK)[None, :])
    state = state ^ 16  # length of the key in bytes
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)
