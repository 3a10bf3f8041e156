"""Captured programs against eager autograd: one trainer of each mode is told the same and has to say the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from family_models import MODELS, family_model
from ranks import close, equal, far
from tiny_policy import gradients, make_samples, one_rank

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import AlgorithmConfig, KernelConfig, KLConfig, OptimizerConfig
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import PackedBatch

MODES = ("eager", "graph")
PRESETS = ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "rloo")
NOT_COMPUTED = {"train/tokens_per_s", "train/peak_memory_gb", "train/compilations"}
Tensors = dict[str, torch.Tensor]


def trainer_in(mode: str, model_dir: Path, algorithm: AlgorithmConfig | None = None, **options):
    return one_rank(model_dir, algorithm, execution={"mode": mode}, **options)


def computed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in NOT_COMPUTED}


def minibatches(count: int, seed: int = 0, reference: bool = True) -> list[PackedBatch]:
    """Four micro-batches each, of rows that hold several samples and padding."""
    batches = [pack(make_samples(14, seed + number), [64], 1, 128) for number in range(count)]
    for batch in batches if reference else []:
        noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(seed))
        batch.reference_logprobs = batch.sampler_logprobs + 0.1 * noise * batch.loss_mask
    return batches


def moments(trainer: PolicyTrainer) -> Tensors:
    states = trainer.optimizer.optimizer.state_dict()
    return {name: value.clone() for name, value in states.items() if isinstance(value, torch.Tensor)}


def weights(trainer: PolicyTrainer) -> Tensors:
    return trainer.full_tensors() | moments(trainer)


def taken(trainer: PolicyTrainer) -> Tensors:
    """The gradients that were added up so far, by Hugging Face's names, and none of them any more."""
    found = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    for parameter in trainer.policy.model.parameters():
        parameter.grad.zero_()
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradients_of_every_preset(model_dir, preset):
    algorithm = load_config(["+experiment=quickstart", f"algorithm={preset}"]).algorithm
    (batch,) = minibatches(1)
    found = {}
    for mode in MODES:
        with trainer_in(mode, model_dir, algorithm, max_response_tokens=64) as trainer:
            found[mode] = trainer.backward(batch), taken(trainer)
    (expected, slopes), (metrics, ours) = found["eager"], found["graph"]
    assert expected["loss"] != 0
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert close(ours, slopes, 1e-5)


@dataclass
class Story:
    """What a trainer said on its way."""

    metrics: list[dict[str, float]]
    numbers: Tensors
    """Log-probabilities, before and after."""
    first: Tensors
    """Weights after one update."""
    last: Tensors
    """Weights and moments at the end."""


def story(trainer: PolicyTrainer) -> Story:
    batches = minibatches(2)
    numbers = {"before": trainer.logprobs(batches[0]), "masked": trainer.logprobs(batches[0], only_loss=True)}
    numbers["reference"] = trainer.logprobs(batches[1], reference=True)
    metrics = [trainer.update(batches[0])]
    first = trainer.full_tensors()
    metrics += trainer.learn(batches)
    numbers |= {"after": trainer.logprobs(batches[0]), "still": trainer.logprobs(batches[1], reference=True)}
    trainer.refresh_reference()
    numbers["refreshed"] = trainer.logprobs(batches[0], reference=True)
    return Story(metrics, numbers, first, weights(trainer))


SETTINGS = [
    pytest.param((True, "adamw", "float32"), id="tied"),
    pytest.param((False, "muon", "float32"), id="untied, Muon", marks=pytest.mark.slow),
    pytest.param((False, "adamw", "bfloat16"), id="bfloat16"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_several_updates(model_dirs, settings):
    tied, optimizer, dtype = settings
    algorithm = AlgorithmConfig(epochs=2, kl=KLConfig(coefficient=0.1), entropy_coefficient=0.01)
    options = {
        "optimizer": OptimizerConfig(name=optimizer, learning_rate=1e-3, weight_decay=0.1, warmup_steps=3),
        "microbatch_tokens": 256,
    }
    found = {}
    for mode, precision in [("eager", "float32"), *((mode, dtype) for mode in MODES)]:
        with trainer_in(mode, model_dirs[tied], algorithm, param_dtype=precision, **options) as trainer:
            found[mode, precision] = story(trainer)
    exact, eager, graph = found["eager", "float32"], found["eager", dtype], found["graph", dtype]
    assert [set(step) - {"train/compilations"} for step in graph.metrics] == [set(step) for step in eager.metrics]
    assert graph.numbers["before"].abs().max() > 1
    assert not torch.equal(graph.numbers["after"], graph.numbers["before"])
    torch.testing.assert_close(graph.numbers["still"], graph.numbers["reference"], rtol=0, atol=0)
    if dtype == "bfloat16":  # twins of one rounding, which they do not share
        for name, numbers in graph.numbers.items():
            gap = (eager.numbers[name] - exact.numbers[name]).abs()
            ours = (numbers - exact.numbers[name]).abs()
            assert 0 < ours.mean() < 1.5 * gap.mean(), name
        assert far(graph.first, exact.first) < 1.5 * far(eager.first, exact.first)
        return
    for ours, theirs in zip(graph.metrics, eager.metrics, strict=True):
        assert computed(ours) == pytest.approx(computed(theirs), rel=1e-3, abs=1e-4)
    # Adam divides tiny gradients by their own size, and Muon rounds to bfloat16: float noise moves a few weights visibly.
    tolerance = 1e-4 if optimizer == "adamw" else 2e-3
    for name, numbers in graph.numbers.items():
        torch.testing.assert_close(numbers, eager.numbers[name], rtol=0, atol=10 * tolerance, msg=name)
    assert far(graph.first, eager.first) < tolerance
    assert far(graph.last, eager.last) < 10 * tolerance


SLOW = {name: [] if name == "qwen3_moe mixed tied" else [pytest.mark.slow] for name in MODELS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SLOW.items()])
def test_every_family(tmp_path, name):
    family_model(name).save_pretrained(tmp_path)
    (batch,) = minibatches(1)
    optimizer = OptimizerConfig(name="muon" if "mixed" in name else "adamw", learning_rate=1e-3)
    found = {}
    for mode in MODES:
        with trainer_in(mode, tmp_path, optimizer=optimizer) as trainer:
            metrics, slopes = trainer.backward(batch), taken(trainer)
            trainer.update(batch)
            trainer.export_hf(tmp_path / mode)
            found[mode] = metrics, slopes, trainer.full_tensors()
    (expected, theirs, learnt), (metrics, ours, weights) = found["eager"], found["graph"]
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert close(ours, theirs, 1e-5)
    assert far(weights, learnt) < (1e-4 if optimizer.name == "muon" else 1e-5)
    files = [sorted(path.name for path in (tmp_path / mode).iterdir()) for mode in MODES]
    assert files[0] == files[1]


@pytest.mark.slow
def test_kernels_are_parts_of_programs(tmp_path):
    """Where there is no TPU their operators are computed by plain PyTorch."""
    family_model("qwen3_moe").save_pretrained(tmp_path)
    batch = pack(make_samples(14), [128], 1, 128)
    kernels = KernelConfig(
        attention="splash", head="fused", experts="grouped", attention_block_q=128, attention_block_kv=128
    )
    found = {}
    for mode, options in (("eager", {}), ("graph", {"kernels": kernels})):
        algorithm = AlgorithmConfig(entropy_coefficient=0.01)
        with trainer_in(mode, tmp_path, algorithm, row_tokens=[128], **options) as trainer:
            found[mode] = trainer.logprobs(batch), trainer.backward(batch), taken(trainer)
    (expected, metrics, theirs), (logprobs, ours, slopes) = found["eager"], found["graph"]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert ours == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    assert close(slopes, theirs, 1e-5)


@pytest.fixture(scope="module")
def handed_over(model_dir, tmp_path_factory) -> Callable[[str], tuple[Tensors, Tensors, Path]]:
    """By mode: weights and moments after an update, after the next one, and the checkpoint and export between the two."""
    made = {}

    def hand_over(mode: str) -> tuple[Tensors, Tensors, Path]:
        if mode not in made:
            out, batches = tmp_path_factory.mktemp(mode), minibatches(2, reference=False)
            with trainer_in(mode, model_dir) as trainer:
                trainer.update(batches[0])
                trainer.save(out / "checkpoint")
                trainer.export_hf(out / "hf")
                assert trainer.saved()
                between = weights(trainer)
                trainer.update(batches[1])
                made[mode] = between, weights(trainer), out
        return made[mode]

    return hand_over


@pytest.mark.parametrize(("writer", "reader"), [("eager", "graph"), ("graph", "eager")])
def test_a_checkpoint_of_one_mode_goes_on_in_the_other(model_dir, handed_over, writer, reader):
    between, after, out = handed_over(writer)
    with trainer_in(reader, model_dir) as trainer:
        trainer.load(out / "checkpoint")
        assert equal(weights(trainer), between)
        assert trainer.optimizer.schedule.schedulers[0].last_epoch == 1
        trainer.update(minibatches(2, reference=False)[1])
        assert far(weights(trainer), after) < 1e-5
    assert far(after, between) > 1e-3


def test_a_checkpoint_holds_every_tensor_once(handed_over):
    """The parameters are views of larger tensors, which are not to be written with each of them."""
    sizes = [
        sum(file.stat().st_size for file in (handed_over(mode)[2] / "checkpoint").glob("*.distcp")) for mode in MODES
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_an_exported_directory_is_that_of_the_weights(model_dir, handed_over):
    between, _, out = handed_over("graph")
    with trainer_in("eager", out / "hf") as trainer:
        assert equal(trainer.full_tensors(), {name: between[name] for name in trainer.full_tensors()})


def test_what_engines_get_are_views_of_the_live_parameters(model_dir):
    with trainer_in("graph", model_dir) as trainer:
        storages = {p.untyped_storage().data_ptr() for p in trainer.policy.model.parameters()}
        shards = list(trainer.shards(torch.float32))
        tensors = trainer.full_tensors()
    assert {shard.name for shard in shards} == tensors.keys()
    assert all(shard.data.untyped_storage().data_ptr() in storages for shard in shards)
    assert all(torch.equal(shard.data, tensors[shard.name]) for shard in shards)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(model_dir):
    (good,) = minibatches(1, reference=False)
    bad = replace(good, advantages=good.advantages * 1e38 * 1e38)
    with trainer_in("graph", model_dir) as trainer:
        trainer.update(good)
        before = weights(trainer)
        skipped = trainer.update(bad)
        assert equal(weights(trainer), before)
        assert skipped["train/skipped_updates"] == 1
        assert not math.isfinite(skipped["train/grad_norm"])
        trainer.backward(good)
        expected = taken(trainer)
        trainer.backward(good)
        name, parameter = list(trainer.policy.model.named_parameters())[-1]
        parameter.grad.view(-1)[-1] = math.nan
        assert trainer.optimizer.step()["skipped_updates"] == 1, name
        assert equal(weights(trainer), before)
        trainer.backward(good)
        assert equal(taken(trainer), expected), "nothing is left of the gradients that were skipped"
        assert trainer.update(good)["train/skipped_updates"] == 0
        assert trainer.optimizer.schedule.schedulers[0].last_epoch == 2
        assert not equal(weights(trainer), before)


def test_a_policy_too_far_from_the_old_one_is_left_as_it_is(model_dir):
    (batch,) = minibatches(1, reference=False)
    with trainer_in("graph", model_dir, AlgorithmConfig(max_kl=1e-6, epochs=3)) as trainer:
        before = weights(trainer)
        (step,) = trainer.learn([batch])
        assert step["train/early_stops"] == 1
        assert step["train/skipped_updates"] == 0
        assert step["train/grad_norm"] > 0
        assert equal(weights(trainer), before)
