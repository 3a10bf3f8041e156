"""The checksums SGLang reports of its live weights, computed from the trainer's Hugging Face tensors.

SGLang hashes every parameter of its model as it lies in memory (``/weights_checker``, action ``checksum``): the first 8
bytes of sha256 over the raw bytes, as 16 hex digits. Along dimension 0 its model stacks q, k and v, gate and up, and all
experts of a layer, and it fills the vocabulary up with rows of zeros.

Each of its tensor-parallel ranks holds a slice: of rows where a projection comes first in its block (and of the
vocabulary), of columns where it comes last. Norms, routers and biases of the latter are whole on every rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""What a module becomes a part of, and which part. These are sliced by rows."""
SLICED_BY_COLUMNS = ("o_proj", "down_proj")
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


def key_value_heads(model_dir: Path) -> int | None:
    """As the model's config.json says; None if it does not."""
    return json.loads((model_dir / "config.json").read_text()).get("num_key_value_heads")


def on_rank(parameter: str, rank: int, tensor_parallel: int) -> str:
    """What a tensor-parallel rank's part of an engine's parameter is called here; where there is one rank, as itself."""
    return parameter if tensor_parallel == 1 else f"{parameter} of rank {rank}"


def expected_checksums(
    named_tensors: Mapping[str, torch.Tensor], tensor_parallel: int = 1, key_value_heads: int | None = None
) -> dict[str, str]:
    """Checksum of every parameter of an engine that holds exactly these tensors, in their dtype, on each of its ranks.

    ``key_value_heads`` matters where the engine has more ranks than that: several then hold the same head.
    """
    expected = {}
    for rank in range(tensor_parallel):
        parts: dict[str, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
        for name, tensor in named_tensors.items():
            parameter, position = _place(name)
            if name in (EMBEDDING, OUTPUT_LAYER):
                rows, padding = _rows_of_vocabulary(tensor, rank, tensor_parallel)
                parts[parameter] = {(0, 0): rows, (1, 0): padding}
            else:
                parts[parameter][position] = _slice(name, tensor, rank, tensor_parallel, key_value_heads)
        for parameter, of in parts.items():
            of_rank = checksum(*(tensor for _, tensor in sorted(of.items())))
            expected[on_rank(parameter, rank, tensor_parallel)] = of_rank
    return expected


def _rows_of_vocabulary(tensor: torch.Tensor, rank: int, tensor_parallel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows, and the zeros they are filled up with."""
    rows = -(-len(tensor) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tensor_parallel
    mine = tensor[rank * rows : (rank + 1) * rows]
    return mine, tensor.new_zeros(rows - len(mine), *tensor.shape[1:])


def _slice(
    name: str, tensor: torch.Tensor, rank: int, tensor_parallel: int, key_value_heads: int | None
) -> torch.Tensor:
    leaf, _, kind = name.rpartition(".")
    leaf = leaf.rpartition(".")[2]
    parts = tensor_parallel
    if leaf in ("k_proj", "v_proj"):
        parts = min(tensor_parallel, key_value_heads or tensor_parallel)
    if leaf in STACKED:
        return tensor.tensor_split(parts)[rank * parts // tensor_parallel]
    if leaf in SLICED_BY_COLUMNS and kind == "weight":
        return tensor.tensor_split(parts, dim=1)[rank]
    return tensor


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
    wrong = {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
    for one, other in ((expected, held), (held, expected)):
        tied = {name for name in wrong - other.keys() if name.startswith(OUTPUT_LAYER)}
        wrong -= {name for name in tied if one[name] == held.get(name.replace(OUTPUT_LAYER, EMBEDDING))}
    return sorted(wrong)
