"""What is written while training goes on, and directories that are no checkpoint, or none of this model."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import pytest
import torch
from tiny_policy import make_samples, one_rank
from torch.distributed.checkpoint import FileSystemWriter

from rl_tpu.config.schema import AlgorithmConfig, CheckpointConfig, KLConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.packing import pack


class Disk:
    """A disk that is `asked` to write and does so once it is `ready`."""

    def __init__(self):
        self.asked, self.ready = threading.Event(), threading.Event()


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    disk, write_data = Disk(), FileSystemWriter.write_data

    def wait_and_write(*args):
        disk.asked.set()
        disk.ready.wait()
        return write_data(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", wait_and_write)
    yield disk
    disk.ready.set()


def test_what_is_written_while_training_goes_on_is_the_policy_at_the_call(model_dir, tmp_path, disk):
    batch = pack(make_samples(6), [64], 1, 128)
    with one_rank(model_dir) as trainer:
        trainer.update(batch)
        before, drawn = trainer.full_tensors(), torch.get_rng_state()
        trainer.save(tmp_path / "one")
        expected = trainer.update(batch)
        torch.rand(3)
        after = trainer.full_tensors()
        assert not trainer.saved(wait=False)
        assert not (tmp_path / "one" / ".metadata").exists()
        disk.ready.set()
        assert trainer.saved()
        trainer.load(tmp_path / "one")
        restored = trainer.full_tensors()
        assert torch.equal(torch.get_rng_state(), drawn)
        again = trainer.update(batch)
        after_again = trainer.full_tensors()
    assert all(torch.equal(restored[name], before[name]) for name in before)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(after_again[name], after[name]) for name in after)
    assert again["train/grad_norm"] == expected["train/grad_norm"]


def test_a_write_that_fails_in_the_background_is_said_once_in_one_line(model_dir, tmp_path, disk):
    with one_rank(model_dir) as trainer:
        trainer.save(tmp_path / "gone")
        assert disk.asked.wait(60)
        shutil.rmtree(tmp_path / "gone")
        disk.ready.set()
        with pytest.raises(RunError, match=r"could not be written \(FileNotFoundError: ") as caught:
            trainer.saved()
        assert "\n" not in str(caught.value)
        assert trainer.saved()
        trainer.save(tmp_path / "next")
        assert trainer.saved()
        trainer.load(tmp_path / "next")


def test_without_a_background_a_checkpoint_is_on_disk_when_save_returns(model_dir, tmp_path):
    with one_rank(model_dir, checkpoint=CheckpointConfig(mode="sync")) as trainer:
        trainer.save(tmp_path / "one")
        assert (tmp_path / "one" / ".metadata").is_file()
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match=r"could not be written \(FileExistsError: .*; .* GB are free in /"):
            trainer.save(tmp_path / "file")


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_reference_that_was_refreshed_is_in_the_checkpoint(model_dir, tmp_path, refreshed):
    batch = pack(make_samples(6), [64], 1, 128)
    batch.reference_logprobs = batch.sampler_logprobs
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1))
    with one_rank(model_dir, algorithm) as trainer:
        trainer.update(batch)
        if refreshed:
            trainer.refresh_reference()
        trainer.update(batch)
        expected = trainer.logprobs(batch, reference=True)
        trainer.save(tmp_path / "one")
        trainer.refresh_reference()
    with one_rank(model_dir, algorithm) as trainer:
        trainer.load(tmp_path / "one")
        assert torch.equal(trainer.logprobs(batch, reference=True), expected)
        assert not torch.equal(trainer.logprobs(batch), expected)


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
            assert trainer.saved()
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
