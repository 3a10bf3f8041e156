"""The policy in Hugging Face's names: this rank's shards for weight_sync, and whole tensors for a directory on disk.

With tied embeddings there is one tensor, `model.embed_tokens.weight`; whoever loads it ties `lm_head` to it again, as
Hugging Face and SGLang do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rl_tpu.config.schema import TrainerConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.trainer import process_group
from rl_tpu.trainer.checkpoint import load_weights
from weight_sync import Shard, local_shards

if TYPE_CHECKING:
    from rl_tpu.trainer.policy import Policy

FILE_BYTES = 5 * 10**9
"""Size from which on weights are spread over several files."""
# Files that make a directory of weights a model: configuration, generation settings, tokenizer, chat template.
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


def write_hf(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], model_dir: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write a Hugging Face directory: `tensors` in the dtypes they have in `model_dir`, its configuration, generation
    settings and tokenizer.

    At most `file_bytes` of weights (or one tensor) are in memory at a time. The directory appears, or is replaced, when
    all of it is written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted({path for pattern in _COMPANIONS for path in model_dir.glob(pattern)}):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, partial)
    dtypes = stored_dtypes(model_dir)
    _write_weights(partial, ((name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in tensors), file_bytes)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def export_checkpoint(checkpoint: Path, model_dir: Path, directory: Path) -> None:
    """`write_hf` of the policy in a trainer's checkpoint, by this process alone; UserError where it is none of the model."""
    device = get_device("cpu")
    prepare_torchtitan(device)
    from rl_tpu.trainer.model import build_policy

    config = TrainerConfig(steps=1, param_dtype="float32")
    process_group.join(device, config.step_timeout_s)
    try:
        policy = build_policy(model_dir, device, device.torch_device(0), config)
        load_weights(policy, checkpoint)
        write_hf(directory, full_tensors(policy, keep=True), model_dir)
    finally:
        process_group.leave()


def _write_weights(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> None:
    """model.safetensors, or model-00001-of-0000N.safetensors and the index that says where each tensor is."""
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        save_file(held, directory / f"{len(files)}.part", {"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > file_bytes:
            write()
            size = 0
        held[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        (directory / f"{number}.part").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
