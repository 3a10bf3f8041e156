"""What the model and its output layer are given for a micro-batch of packed rows, made once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from rl_tpu.trainer.attention import segment_mask, segment_table
from rl_tpu.types import PackedBatch


@dataclass(frozen=True)
class ModelInputs:
    """
    tokens, positions  [R', L']
    attention          what SegmentAttention takes
    places             [N]  positions of the model's rows, counted through them, whose predictions are wanted; None: all
    labels             [N]  what they predict
    targets            [N]  where the predictions belong, counted through the packed rows; None: in their order
    size               positions of the packed rows
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: torch.Tensor
    places: torch.Tensor | None
    labels: torch.Tensor
    targets: torch.Tensor | None
    size: int

    def spread(self, predictions: torch.Tensor) -> torch.Tensor:
        """[N] -> [size], 0 where nothing was predicted."""
        if self.targets is None:
            return predictions
        return predictions.new_zeros(self.size).index_copy(0, self.targets, predictions)


def without_padding(rows: PackedBatch, wanted: torch.Tensor, multiple: int) -> ModelInputs:
    """One row of the tokens that there are, filled up to a multiple of so many (at least one), and the wanted [R, L]
    predictions alone. Its shapes depend on the data."""
    real = (rows.segment_ids.flatten() > 0).nonzero().flatten()
    targets = wanted.flatten().nonzero().flatten()
    filling = max(multiple, -(-len(real) // multiple) * multiple) - len(real)
    return ModelInputs(
        tokens=pad(rows.input_ids.flatten()[real], (0, filling)).unsqueeze(0),
        positions=pad(rows.positions.flatten()[real], (0, filling)).unsqueeze(0),
        attention=segment_table(rows.segment_ids, rows.prefix_ids),
        places=torch.searchsorted(real, targets),
        labels=rows.labels.flatten()[targets],
        targets=targets,
        size=wanted.numel(),
    )


def all_positions(rows: PackedBatch, wanted: torch.Tensor, splash: bool) -> ModelInputs:
    """The rows as they are and every prediction, those that are not wanted without a label. Its shapes are the rows'.
    With `splash`, attention is splash attention, which knows no prefixes."""
    # The type of segment ids is what SegmentAttention knows them by.
    attention = rows.segment_ids.int() if splash else segment_mask(rows.segment_ids, rows.prefix_ids)
    return ModelInputs(
        tokens=rows.input_ids,
        positions=rows.positions,
        attention=attention,
        places=None,
        labels=torch.where(wanted, rows.labels, -1).flatten(),
        targets=None,
        size=wanted.numel(),
    )
