"""The checksums SGLang reports of its live weights, computed from the trainer's Hugging Face tensors.

SGLang hashes every parameter of its model as it lies in memory (``/weights_checker``, action ``checksum``): the first 8
bytes of sha256 over the raw bytes, as 16 hex digits. Its model stacks q, k and v, and gate and up, along dimension 0, and
fills the vocabulary up with rows of zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64
"""SGLang's DEFAULT_VOCAB_PADDING_SIZE."""


def checksum(*parts: torch.Tensor) -> str:
    """Of the parts' bytes, one after the other (equal to stacking along dimension 0)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def expected_checksums(named_tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Checksum of every parameter of an engine (tensor_parallel 1) that holds exactly these tensors, in their dtype."""
    expected = {}
    for name, tensor in named_tensors.items():
        fused, sources = _fused(name)
        if name in VOCABULARY:
            expected[name] = checksum(tensor, tensor.new_zeros(-len(tensor) % VOCABULARY_MULTIPLE, *tensor.shape[1:]))
        elif sources is None:
            expected[name] = checksum(tensor)
        elif name == sources[0]:
            expected[fused] = checksum(*(named_tensors[source] for source in sources))
    return expected


def _fused(name: str) -> tuple[str, list[str] | None]:
    """The engine's parameter that a tensor is a part of, and the names of all its parts in order."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    for fused, leaves in FUSED.items():
        if leaf in leaves:
            return f"{parent}.{fused}.{kind}", [f"{parent}.{source}.{kind}" for source in leaves]
    return name, None


def differing(expected: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names of parameters that differ or that one side lacks. A tied output layer may appear on one side only."""
    names = expected.keys() | held.keys()
    embedding = held.get("model.embed_tokens.weight")
    if "lm_head.weight" not in held and expected.get("lm_head.weight") == embedding:
        names -= {"lm_head.weight"}
    if "lm_head.weight" not in expected and held.get("lm_head.weight") == embedding:
        names -= {"lm_head.weight"}
    return sorted(name for name in names if expected.get(name) != held.get(name))
