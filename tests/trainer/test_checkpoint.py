"""Directories that are no checkpoint, or none of this model."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import make_samples, one_rank

from rl_tpu.errors import UserError
from rl_tpu.trainer.packing import pack


def test_a_checkpoint_that_is_missing_or_damaged_is_refused(model_dir, tmp_path):
    def damage(name: str) -> None:
        (data,) = (tmp_path / name).glob("*.distcp")
        if name == "no metadata":
            (tmp_path / name / ".metadata").unlink()
        elif name == "no data":
            data.unlink()
        elif name == "cut":
            data.write_bytes(data.read_bytes()[:1000])

    with one_rank(model_dir) as trainer:
        trainer.update(pack(make_samples(6), [64], 1, 128))
        before = trainer.full_tensors()
        for name in ("whole", "no metadata", "no data", "cut"):
            trainer.save(tmp_path / name)
            damage(name)
        for name in ("nowhere", "no metadata", "no data", "cut"):
            with pytest.raises(UserError, match=f"resume: .*{name} is not a checkpoint of this model") as caught:
                trainer.load(tmp_path / name)
            assert "\n" not in str(caught.value)
        trainer.load(tmp_path / "whole")
        after = trainer.full_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_checkpoint_of_another_model_is_refused(model_dirs, tmp_path):
    with one_rank(model_dirs[True]) as trainer:
        trainer.save(tmp_path / "tied")
    with one_rank(model_dirs[False]) as trainer, pytest.raises(UserError, match="not a checkpoint of this model"):
        trainer.load(tmp_path / "tied")
