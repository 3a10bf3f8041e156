"""The policy in Hugging Face's names: this rank's shards for weight_sync, and whole tensors for a directory on disk.

With tied embeddings there is one tensor, `model.embed_tokens.weight`; whoever loads it ties `lm_head` to it again, as
Hugging Face and SGLang do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from weight_sync import Shard, local_shards

if TYPE_CHECKING:
    from rl_tpu.trainer.policy import Policy

# Files that make a directory of weights a model: configuration, tokenizer, chat template.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "LICENSE*")
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@torch.no_grad()
def shards(policy: Policy, dtype: torch.dtype) -> Iterator[Shard]:
    """The regions of every tensor that lie on this rank, as views of the live parameters, to be published as `dtype`.

    All ranks' shards together cover every tensor exactly once; a rank yields nothing of a tensor it has no row of.
    """
    for name, tensor in policy.adapter.to_hf(policy.model.state_dict()).items():
        yield from local_shards(name, tensor, dtype)


@torch.no_grad()
def full_tensors(policy: Policy, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor whole, in float32 on the host, on the ranks that `keep` them. All ranks take part: one parameter at a
    time is gathered on the devices, and only then named as Hugging Face does, for there a rank has some experts only."""
    for parameter, tensor in policy.model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            for name, part in policy.adapter.to_hf({parameter: whole}).items():
                # A copy even where the gathered tensor is the live parameter itself.
                yield name, part.detach().to("cpu", copy=True)


def write_hf(directory: Path, tensors: dict[str, torch.Tensor], model_dir: Path) -> None:
    """Write a Hugging Face directory: `tensors` in the dtypes they have in `model_dir`, its configuration and tokenizer.

    The directory appears, or is replaced, when all of it is written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted({path for pattern in _COMPANIONS for path in model_dir.glob(pattern)}):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, partial)
    dtypes = stored_dtypes(model_dir)
    cast = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    save_torch_state_dict(cast, partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def stored_dtypes(model_dir: Path) -> dict[str, torch.dtype]:
    """Dtype of every floating-point tensor in the safetensors of a directory, from their headers."""
    dtypes = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                stored = file.get_slice(name).get_dtype()
                if stored in _SAFETENSORS_DTYPES:
                    dtypes[name] = _SAFETENSORS_DTYPES[stored]
    return dtypes
