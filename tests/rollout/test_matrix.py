"""Every transport, from every kind of trainer, to every kind of engine: the engine's own checksums of its live weights
are those of the trainer's bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import trainer_ranks
from remote_processes import on_all, start_ranks
from tiny import load_model, make_config, reference_logprobs
from trainer_ranks import SIDES
from transport_options import AVAILABLE, sender_options

from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import SamplingParams

PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]
KINDS = list(itertools.product((1, 2), ("float32", "bfloat16"), ("tied", "untied")))
"""Tensor-parallel ranks, dtype and output layer of an engine."""
QUICK = [(1, "float32", "tied"), (2, "bfloat16", "untied")]


def _kinds() -> list:
    marks = {kind: [] if kind in QUICK else [pytest.mark.slow] for kind in KINDS}
    return [pytest.param(kind, id="-".join(map(str, kind)), marks=marks[kind]) for kind in KINDS]


@pytest.fixture(scope="module", params=_kinds())
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind, model_dirs, local_ray, run, tmp_path_factory):
    tensor_parallel, dtype, output_layer = kind
    config = make_config(model_dirs[output_layer], rollout={"tensor_parallel": tensor_parallel, "dtype": dtype})
    run_dir = tmp_path_factory.mktemp("run")
    engine = run(SGLangEngine.start(config, model_dirs[output_layer], run_dir, 0, {"num_cpus": 0}))
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Ranks by their number."""
    trainers = {count: start_ranks(count, tmp_path_factory.mktemp("gloo") / "store") for count in set(SIDES.values())}
    yield trainers
    for ranks in trainers.values():
        for rank in ranks:
            rank.kill()


versions = itertools.count(1)


@pytest.fixture
def sync(engine, kind, trainers, model_dirs, run, run_id, tmp_path):
    """Brings a new policy from a trainer to the engine; returns it whole, in the engine's dtype."""
    _, dtype, output_layer = kind
    model_dir, dtype = model_dirs[output_layer], getattr(torch, dtype)
    config = engine._config
    used = []

    def sync(transport: str, side: str, **options) -> dict[str, torch.Tensor]:
        version, ranks = next(versions), trainers[SIDES[side]]
        used.extend(ranks)
        weight_sync = config.weight_sync.model_copy(update={"transport": transport})
        engine._config = config.model_copy(update={"weight_sync": weight_sync})
        on_all(ranks, trainer_ranks.hold, model_dir, version, side)
        options = sender_options(transport, tmp_path) | options
        handle = on_all(ranks, trainer_ranks.publish, transport, run_id, options, version, dtype)[0]
        run(engine.update_weights(handle, version))
        return {name: tensor.to(dtype) for name, tensor in trainer_ranks.weights(model_dir, version).items()}

    yield sync
    engine._config = config
    on_all(used, trainer_ranks.close_sender)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("transport", AVAILABLE)
def test_the_engine_holds_the_trainers_bytes(engine, kind, sync, run, transport, side):
    before = run(engine.weight_checksums())
    policy = sync(transport, side)
    expected = expected_checksums(policy, tensor_parallel=kind[0])
    assert len(differing(expected, before)) == len(expected)
    assert differing(expected, run(engine.weight_checksums())) == []


def test_it_answers_as_the_trainer_would(engine, kind, sync, model_dirs, run):
    """A second proof, by what the weights are for: transformers gives the same tokens the same log-probabilities."""
    _, dtype, output_layer = kind
    model = load_model(model_dirs[output_layer])
    model.load_state_dict(sync("shared_memory", "fsdp"), strict=False)
    (answer,) = run(engine.generate(PROMPT, SamplingParams(12, temperature=0.0), 1))
    expected = reference_logprobs(model, PROMPT, answer.response_ids)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert torch.allclose(torch.tensor(answer.logprobs), expected, rtol=0, atol=tolerance)


def test_the_policy_is_sharded_as_its_side_says(trainers, model_dirs):
    held = {
        side: on_all(trainers[count], trainer_ranks.hold, model_dirs["untied"], 0, side)[0]
        for side, count in SIDES.items()
    }
    attention = "model.layers.1.self_attn"
    assert set(map(tuple, held["one_rank"].values())) == {()}
    assert set(map(tuple, held["fsdp"].values())) == {("S(0)",)}
    assert held["tensor_parallel"][f"{attention}.q_proj.weight"] == ["S(0)"]
    assert held["tensor_parallel"][f"{attention}.o_proj.weight"] == ["S(1)"]
    assert held["tensor_parallel"]["lm_head.weight"] == ["S(0)"]
    assert held["tensor_parallel"]["model.norm.weight"] == ["R"]
