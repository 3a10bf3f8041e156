"""The files of a Hugging Face checkpoint: safetensors shards, their index, and what a model's directory has beside them.

A safetensors file is 8 bytes of header length (little-endian), a JSON header that gives dtype, shape and byte range of
every tensor, and the tensors' bytes without gaps (https://huggingface.co/docs/safetensors). Only the header is made
here, so that the bytes can be streamed to any place.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.manifest import TensorEntry, aligned
from weight_sync.portions import batches

INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)|.*\.index\.json")


@dataclass(frozen=True)
class FilePlan:
    """One file of a version: the tensors in it, in their order in the file."""

    name: str
    entries: tuple[TensorEntry, ...]


def plan_files(owned: Sequence[Sequence[TensorEntry]], file_bytes: int) -> list[list[FilePlan]]:
    """The files that each owner (outer list) writes for its tensors, about ``file_bytes`` each and numbered through.

    Tensors of wide dtypes come first, so that each starts at a multiple of its dtype's size and can be used in place.
    """

    def widest_first(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        return sorted(entries, key=lambda entry: -entry.torch_dtype.itemsize)

    groups = [list(batches(widest_first(entries), file_bytes)) for entries in owned]
    count, numbers = sum(map(len, groups)), itertools.count(1)
    return [
        [FilePlan(f"model-{next(numbers):05d}-of-{count:05d}.safetensors", tuple(entries)) for entries in files]
        for files in groups
    ]


def safetensors_header(entries: Sequence[TensorEntry]) -> bytes:
    """Everything of a safetensors file before the tensors' bytes, padded so that those start aligned."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.dtype not in SAFETENSORS_DTYPES:
            raise WeightSyncError(f"{entry.name}: safetensors has no dtype for {entry.dtype}")
        end = start + entry.nbytes
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(aligned(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def index_json(files: Sequence[FilePlan]) -> bytes:
    """``model.safetensors.index.json``: in which file each tensor is."""
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry.nbytes for file in files for entry in file.entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def companion_files(model_dir: Path | None, dtypes: set[str]) -> dict[str, bytes]:
    """Configuration, tokenizer, chat template and other files of ``model_dir`` that are not weights, by name.

    Where all weights have one floating dtype, the configuration says so. Nothing without a ``model_dir``.
    """
    if model_dir is None:
        return {}
    try:
        files = [path for path in sorted(model_dir.iterdir()) if path.is_file() and not _WEIGHTS.fullmatch(path.name)]
        companions = {path.name: path.read_bytes() for path in files if not path.name.startswith(".")}
    except OSError as error:
        raise WeightSyncError(f"option model_dir {model_dir} cannot be read: {error}") from error
    if "config.json" not in companions:
        raise WeightSyncError(f"option model_dir {model_dir} has no config.json; give the directory of the start model")
    floating = {dtype for dtype in dtypes if getattr(torch, dtype).is_floating_point}
    if len(floating) == 1:
        config = json.loads(companions["config.json"])
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = floating.pop()
        companions["config.json"] = json.dumps(config, indent=2).encode()
    return companions
