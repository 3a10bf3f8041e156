"""What is sent: tensors with the names and shapes of a Qwen3, or so many bytes, cut by rows over the senders.

Every round changes some elements of every tensor by their lowest bit, as an optimizer step with a small learning rate
does to bfloat16 weights, and writes the round's number into every shard. Sums of the tensors' bytes as integers tell
the rounds apart, and do it independently of the hashes that a transport makes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.shard import Shard

DTYPE = torch.bfloat16
SUM_DTYPE = torch.int64
ROW_ALIGNMENT = SUM_DTYPE.itemsize // DTYPE.itemsize
"""Shards begin at multiples of so many rows, so that the integers of the shards are those of the whole tensor."""
TILE = 1 << 20
"""Elements of the random numbers that fill the tensors, over and over: more than a compressor looks back."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

QWEN3 = {
    "qwen3_tiny": {"layers": 2, "hidden": 256, "intermediate": 768, "heads": 4, "kv_heads": 2, "vocabulary": 2048},
    "qwen3_0_6b": {"layers": 28, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8},
    "qwen3_4b": {"layers": 36, "hidden": 2560, "intermediate": 9728, "heads": 32, "kv_heads": 8, "tied": True},
}
"""Models by name. The output layer of ``qwen3_0_6b`` is untied here, which makes it 1.5 GB."""
HEAD_DIM = 128
VOCABULARY = 151_936


@dataclass(frozen=True)
class Payload:
    """``shapes`` by tensor name, all bfloat16; ``changed`` is the share of elements that a round changes."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    changed: float

    @classmethod
    def parse(cls, text: str, changed: float) -> Payload:
        """``qwen3_0_6b``, or bytes such as ``100MB``. Raises ValueError."""
        if text in QWEN3:
            return cls(text, _qwen3_shapes(**QWEN3[text]), changed)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)?", text)
        if match is None:
            raise ValueError(f"payload {text!r} is neither one of {', '.join(QWEN3)} nor a size such as 100MB")
        nbytes = int(float(match[1]) * UNITS[match[2] or ""])
        if nbytes < DTYPE.itemsize:
            raise ValueError(f"payload {text!r} has no element of {DTYPE.itemsize} bytes")
        return cls(text, _shapes_of_size(nbytes), changed)

    @property
    def nbytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * DTYPE.itemsize


def _qwen3_shapes(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    tied: bool = False,
    vocabulary: int = VOCABULARY,
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads * HEAD_DIM, hidden),
            "self_attn.k_proj": (kv_heads * HEAD_DIM, hidden),
            "self_attn.v_proj": (kv_heads * HEAD_DIM, hidden),
            "self_attn.o_proj": (hidden, heads * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if tied else shapes | {"lm_head.weight": (vocabulary, hidden)}


def _shapes_of_size(nbytes: int, columns: int = 1024, rows: int = 2048) -> dict[str, tuple[int, ...]]:
    """Matrices of 4 MiB and one with the rest, to the nearest row of 2 KiB."""
    left = max(1, round(nbytes / DTYPE.itemsize / columns))
    shapes = {}
    while left > 0:
        shapes[f"layers.{len(shapes)}.weight"] = (min(rows, left), columns)
        left -= rows
    return shapes


class PrivateShards:
    """One sender's part of the payload, in memory of its own."""

    def __init__(self, payload: Payload, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self._changed = payload.changed
        tile = (torch.randn(TILE, generator=torch.Generator().manual_seed(rank)) * 0.02).to(DTYPE)
        self.shards = []
        for name, shape in payload.shapes.items():
            start, end = _rows(shape[0], rank, world_size)
            if start < end:
                own = (end - start, *shape[1:])
                data = tile.repeat(-(-math.prod(own) // TILE))[: math.prod(own)].clone().view(own)
                self.shards.append(Shard(name, shape, (start,) + (0,) * (len(shape) - 1), data))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {shard.name: shard.data for shard in self.shards}

    def change(self, round_number: int) -> dict[str, int]:
        """The next round's values. Returns the sum of every shard."""
        generator = torch.Generator().manual_seed(round_number)
        flips = (torch.rand(TILE, generator=generator) < self._changed).to(torch.int16)
        for shard in self.shards:
            bits = shard.data.view(-1).view(torch.int16)
            for part in bits.split(TILE):
                part ^= flips[: len(part)]
            bits[0] = round_number
        return sums(self.tensors)


def hold(state: dict[str, Any], payload: Payload, rank: int = 0, world_size: int = 1) -> None:
    """Run in a worker: make its private tensors."""
    state["shards"] = PrivateShards(payload, rank, world_size)


def _rows(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    chunk = -(-rows // (world_size * ROW_ALIGNMENT)) * ROW_ALIGNMENT
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Every tensor's bytes, added up as 64-bit integers."""
    return {name: int(tensor.reshape(-1).view(SUM_DTYPE).sum()) for name, tensor in tensors.items()}


def add_sums(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    """The sums of the whole tensors, with the overflow of 64-bit integers."""
    total: dict[str, int] = {}
    for of_rank in of_ranks:
        for name, value in of_rank.items():
            total[name] = (total.get(name, 0) + value + 2**63) % 2**64 - 2**63
    return total
