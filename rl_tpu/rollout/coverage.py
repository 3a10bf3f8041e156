"""Whether a set of Hugging Face tensors is exactly what an engine's model consists of.

SGLang's ``load_weights`` skips names it does not know, and leaves alone what it is not given. So before the first load of
a layout the model's own loaders are run once for show: each is given ones of the announced shape and a zeroed stand-in
for its parameter. What is one afterwards would have been written; what is zero would have kept its old value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rl_tpu.rollout.checksums import EMBEDDING, OUTPUT_LAYER
from weight_sync import Manifest


class CoverageError(Exception):
    """The tensors do not fit the engine's model; the message names those that do not."""


class _Rehearsal:
    """Stands in for the loader of every parameter; ``current`` is the tensor that load_weights is at."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]):
        self.current = ""
        self.used: set[str] = set()
        self.written: dict[str, torch.nn.Parameter] = {}
        """Stand-ins by parameter name; a full one is replaced by an empty tensor to free its memory."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def loader(self, original):
        def rehearse(parameter: torch.nn.Parameter, loaded: torch.Tensor, *args, **options) -> None:
            name = self._names[id(parameter)]
            stand_in = self.written.get(name)
            if stand_in is None or stand_in.numel() == 0:
                stand_in = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=torch.uint8), requires_grad=False)
                stand_in.__dict__.update(parameter.__dict__)
            try:
                original(stand_in, loaded, *args, **options)
            except Exception as error:
                raise CoverageError(
                    f"{self.current} of shape {list(loaded.shape)} does not fit the engine's {name} of shape "
                    f"{list(parameter.shape)}: {error or type(error).__name__}"
                ) from error
            self.used.add(self.current)
            self.written[name] = stand_in.new_empty(0) if bool(stand_in.all()) else stand_in

        return rehearse


def check_coverage(model: torch.nn.Module, manifest: Manifest) -> None:
    """Raises CoverageError unless every tensor has a place in the model and every parameter is written whole."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    parameters = dict(model.named_parameters())
    rehearsal = _Rehearsal(parameters)
    originals = {name: parameter.__dict__.get("weight_loader") for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.weight_loader = rehearsal.loader(originals[name] or default_weight_loader)

    def ones() -> Iterator[tuple[str, torch.Tensor]]:
        for entry in manifest.tensors:
            rehearsal.current = entry.name
            yield entry.name, torch.ones((), dtype=torch.uint8).expand(entry.shape)

    try:
        model.load_weights(ones())
    finally:
        for name, parameter in parameters.items():
            if originals[name] is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = originals[name]

    known = rehearsal.used | ({OUTPUT_LAYER} if model.config.tie_word_embeddings else set())
    unknown = [entry.name for entry in manifest.tensors if entry.name not in known]
    if unknown:
        raise CoverageError(f"the engine's model has no place for {_some(unknown)}")
    missing = [name for name in parameters if not _is_whole(name, rehearsal.written.get(name), model)]
    if missing:
        raise CoverageError(f"the new weights leave out all or part of the engine's {_some(missing)}")


def check_tied(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """An output layer sent to a model that shares it with its embedding is not loaded, so it must be equal to that."""
    if not model.config.tie_word_embeddings or OUTPUT_LAYER not in tensors:
        return
    if not torch.equal(tensors[OUTPUT_LAYER], tensors[EMBEDDING]):
        raise CoverageError(f"{OUTPUT_LAYER} differs from {EMBEDDING}, but the engine's model ties them")


def _is_whole(name: str, written: torch.Tensor | None, model: torch.nn.Module) -> bool:
    if written is None:
        return False
    if written.numel() == 0:
        return True
    # Rows that pad the vocabulary belong to no tensor.
    shard = getattr(model.get_submodule(name.rpartition(".")[0]), "shard_indices", None)
    return shard is not None and bool(written[: shard.num_org_elements].all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
