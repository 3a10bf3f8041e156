"""Static shapes: a run has all its programs after its first steps, and every one more is counted."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_policy import VOCABULARY, make_samples, one_rank

from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig
from rl_tpu.devices import CpuDevice
from rl_tpu.errors import RunError
from rl_tpu.trainer.packing import pack
from rl_tpu.types import PackedBatch, Sample, VersionSpan

ROW_TOKENS = [32, 64]
QUICKSTART = {
    "row_tokens": [128],
    "microbatch_tokens": 512,
    "optimizer": OptimizerConfig(learning_rate=5e-5, warmup_steps=5),
}
"""Of configs/trainer/tiny.yaml."""


def uneven_batch(step: int) -> PackedBatch:
    """So many samples, and so long ones, as it happens."""
    draw = random.Random(step)
    return pack(make_samples(draw.randint(1, 12), seed=step, longest=draw.choice([20, 60])), ROW_TOKENS, 1, 32)


def test_nothing_is_captured_after_the_first_steps(model_dir):
    batches = [uneven_batch(step) for step in range(24)]
    assert {batch.row_tokens for batch in batches} == set(ROW_TOKENS)
    assert len({batch.rows for batch in batches}) > 3
    metrics = {}
    for mode in ("eager", "graph"):
        options = {"row_tokens": ROW_TOKENS, "microbatch_tokens": 32, "execution": {"mode": mode}}
        with one_rank(model_dir, steps=len(batches), **options) as trainer:
            metrics[mode] = [trainer.update(batch) for batch in batches]
    assert all("train/compilations" not in step for step in metrics["eager"])
    made = [step["train/compilations"] for step in metrics["graph"]]
    other = next(step for step, batch in enumerate(batches) if batch.row_tokens != batches[0].row_tokens)
    assert {step: count for step, count in enumerate(made) if count} == {0: 2, other: 1}, "backward twice, one update"
    for name in ("loss", "grad_norm", "entropy"):
        curves = [[step[f"train/{name}"] for step in metrics[mode]] for mode in ("eager", "graph")]
        assert curves[1] == pytest.approx(curves[0], rel=1e-3, abs=1e-4), name


def test_one_program_too_many_ends_the_run_and_names_its_shape(model_dir):
    execution = {"mode": "graph", "max_compilations": 2}
    with one_rank(model_dir, row_tokens=ROW_TOKENS, microbatch_tokens=32, execution=execution) as trainer:
        short, long = (pack(make_samples(3, longest=longest), ROW_TOKENS, 1, 32) for longest in (20, 60))
        trainer.update(short)
        with pytest.raises(
            RunError, match=r"backward of 1 x 64 tokens would be program 3, .*max_compilations is 2; so far: b"
        ):
            trainer.update(long)
        trainer.update(short)


def test_eager_programs_of_static_shapes_are_counted_too(model_dir, monkeypatch):
    monkeypatch.setattr(CpuDevice, "dynamic_shapes", False)
    execution = {"max_compilations": 2}
    with one_rank(model_dir, row_tokens=ROW_TOKENS, microbatch_tokens=32, execution=execution) as trainer:
        short, long = (pack(make_samples(3, longest=longest), ROW_TOKENS, 1, 32) for longest in (20, 60))
        trainer.logprobs(short)
        assert [trainer.update(short)["train/compilations"] for _ in range(2)] == [2, 0]
        with pytest.raises(RunError, match="logprobs of 1 x 64 tokens would be program 3"):
            trainer.logprobs(long)


def test_a_compiler_takes_the_graphs_and_compiles_each_once(model_dir, monkeypatch):
    """torch.compile stops at what is no part of one graph, and here at a second compilation; loops stay loops."""
    compiled = []

    def backend(graph, examples):
        compiled.append([node.name for node in graph.graph.nodes if node.target is torch.ops.higher_order.scan])
        return graph

    def compile_graph(self, graph):
        return torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(CpuDevice, "compile_graph", compile_graph)
    batches = [uneven_batch(step) for step in range(6)]
    found = {}
    for mode in ("eager", "graph"):
        options = {"row_tokens": ROW_TOKENS, "microbatch_tokens": 32, "execution": {"mode": mode}}
        with one_rank(model_dir, **options) as trainer, torch._dynamo.config.patch(error_on_recompile=True):
            found[mode] = [trainer.update(batch)["train/loss"] for batch in batches], trainer.logprobs(batches[0])
    assert sorted(map(len, compiled)) == [0, 1, 2, 2], "update, log-probabilities, and backward of two shapes"
    assert found["graph"][0] == pytest.approx(found["eager"][0], rel=1e-3, abs=1e-4)
    torch.testing.assert_close(found["graph"][1], found["eager"][1], rtol=0, atol=1e-3)


def learner_samples(step: int) -> list[Sample]:
    """64 samples of up to 128 tokens, as many as a step of the quickstart has, rewarded for the token 7."""
    draw = random.Random(step)
    samples = []
    for _ in range(64):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))]
        response = [draw.choice([7, draw.randrange(VOCABULARY)]) for _ in range(draw.randint(1, 80))]
        share = response.count(7) / len(response)
        sample = Sample(prompt, response, [1] * len(response), [-5.5] * len(response), [], "stop")
        sample.spans, sample.advantage = [VersionSpan(0, 0, len(response))], share - 0.5
        samples.append(sample)
    return samples


@pytest.mark.slow
def test_two_hundred_steps_of_uneven_lengths(model_dir):
    """The trainer of the quickstart on samples that both modes see: no program is added, and the curves are one."""
    metrics = {}
    for mode in ("eager", "graph"):
        with one_rank(model_dir, AlgorithmConfig(), steps=200, execution={"mode": mode}, **QUICKSTART) as trainer:
            metrics[mode] = [trainer.update(pack(learner_samples(step), [128], 1, 512)) for step in range(200)]
    assert [step["train/compilations"] for step in metrics["graph"]] == [2] + [0] * 199
    for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
        curves = [[step[f"train/{name}"] for step in metrics[mode]] for mode in ("eager", "graph")]
        assert curves[1] == pytest.approx(curves[0], rel=1e-3, abs=1e-4), name
    assert metrics["graph"][-1]["train/ratio_mean"] > 1.01 * metrics["graph"][0]["train/ratio_mean"], "it learnt"
