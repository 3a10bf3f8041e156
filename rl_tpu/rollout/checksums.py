"""The checksums SGLang reports of its live weights, computed from the trainer's Hugging Face tensors.

SGLang hashes every parameter of its model as it lies in memory (``/weights_checker``, action ``checksum``): the first 8
bytes of sha256 over the raw bytes, as 16 hex digits. Along dimension 0 its model stacks q, k and v, gate and up, and all
experts of a layer, and it fills the vocabulary up with rows of zeros.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping

import torch

STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""What a module becomes a part of, and which part."""
STACKED_EXPERTS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)")
EMBEDDING = "model.embed_tokens.weight"
OUTPUT_LAYER = "lm_head.weight"
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
    parts: dict[str, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for name, tensor in named_tensors.items():
        parameter, position = _place(name)
        parts[parameter][position] = tensor
        if name in (EMBEDDING, OUTPUT_LAYER):
            parts[parameter][1, 0] = tensor.new_zeros(-len(tensor) % VOCABULARY_MULTIPLE, *tensor.shape[1:])
    return {parameter: checksum(*(tensor for _, tensor in sorted(of.items()))) for parameter, of in parts.items()}


def _place(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's parameter that a tensor is a part of, and its position among the parts."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    if expert := _EXPERT.fullmatch(parent):
        stacked, part = STACKED_EXPERTS[leaf]
        return f"{expert['experts']}.{stacked}_{kind}", (int(expert["number"]), part)
    if leaf in STACKED:
        stacked, part = STACKED[leaf]
        return f"{parent}.{stacked}.{kind}", (0, part)
    return name, (0, 0)


def differing(expected: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names of parameters that differ or that one side lacks. A tied output layer may appear on one side only."""
    names = expected.keys() | held.keys()
    for one, other in ((expected, held), (held, expected)):
        if OUTPUT_LAYER not in other and one.get(OUTPUT_LAYER) == held.get(EMBEDDING):
            names -= {OUTPUT_LAYER}
    return sorted(name for name in names if expected.get(name) != held.get(name))
