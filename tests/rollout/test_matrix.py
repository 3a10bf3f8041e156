"""Every transport, from every kind of trainer, to every kind of engine: the engine's own checksums of its live weights
are those of the trainer's bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from remote_processes import start_ranks
from tiny import load_model, make_config, reference_logprobs
from trainer_ranks import SIDES, Trainer
from transport_options import sender_options

from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import SamplingParams
from weight_sync.transport import TRANSPORTS

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
def ranks(tmp_path_factory):
    """By their number."""
    ranks = {count: start_ranks(count, tmp_path_factory.mktemp("gloo") / "store") for count in set(SIDES.values())}
    yield ranks
    for remote in itertools.chain(*ranks.values()):
        remote.kill()


versions = itertools.count(1)


@pytest.fixture
def trainer(ranks, kind, model_dirs):
    """Makes a trainer of a kind."""
    trainers = []

    def trainer(side: str) -> Trainer:
        trainers.append(Trainer(ranks[SIDES[side]], side, model_dirs[kind[2]], seed=next(versions)))
        return trainers[-1]

    yield trainer
    for each in trainers:
        each.close()


@pytest.fixture
def sync(engine, kind, run):
    """Brings what a trainer holds to the engine; returns the checksums that it should have then."""
    config = engine._config
    tensor_parallel, dtype = kind[0], getattr(torch, kind[1])

    def sync(trainer: Trainer, transport: str) -> dict[str, str]:
        weight_sync = config.weight_sync.model_copy(update={"transport": transport})
        engine._config = config.model_copy(update={"weight_sync": weight_sync})
        version = next(versions)
        run(engine.update_weights(trainer.publish(version, dtype), version))
        published = {name: parameter.to(dtype) for name, parameter in trainer.policy.items()}
        return expected_checksums(published, tensor_parallel)

    yield sync
    engine._config = config


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_holds_the_trainers_bytes(engine, trainer, sync, run, run_id, tmp_path, transport, side):
    """Of a new policy, and of that policy after an optimizer step."""
    held = [run(engine.weight_checksums())]
    trainer = trainer(side)
    trainer.open(transport, run_id, **sender_options(transport, tmp_path))

    first = sync(trainer, transport)
    held.append(run(engine.weight_checksums()))
    assert differing(first, held[1]) == []
    assert len(differing(first, held[0])) == len(first)  # nothing was there before

    trainer.step()
    second = sync(trainer, transport)
    held.append(run(engine.weight_checksums()))
    assert differing(second, held[2]) == []
    assert differing(second, held[1])


@pytest.mark.parametrize("tensors", [1, 10, 1000])
def test_buckets_of_any_size_agree(engine, trainer, sync, run, run_id, tensors):
    trainer = trainer("fsdp")
    trainer.open("ici", run_id, bucket_tensors=tensors)
    assert differing(sync(trainer, "ici"), run(engine.weight_checksums())) == []


def test_it_answers_as_the_trainer_would(engine, kind, trainer, sync, model_dirs, run, run_id):
    """A second proof, by what the weights are for: transformers gives the same tokens the same log-probabilities."""
    _, dtype, output_layer = kind
    trainer = trainer("fsdp")
    trainer.open("shared_memory", run_id)
    sync(trainer, "shared_memory")
    model = load_model(model_dirs[output_layer])
    model.load_state_dict(trainer.policy, strict=False)
    (answer,) = run(engine.generate(PROMPT, SamplingParams(12, temperature=0.0), 1))
    expected = reference_logprobs(model, PROMPT, answer.response_ids)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert torch.allclose(torch.tensor(answer.logprobs), expected, rtol=0, atol=tolerance)


def test_the_policy_is_sharded_as_its_side_says(ranks, model_dirs):
    held = {side: Trainer(ranks[count], side, model_dirs["untied"], 0).placements for side, count in SIDES.items()}
    attention = "model.layers.1.self_attn"
    assert set(map(tuple, held["one_rank"].values())) == {()}
    assert set(map(tuple, held["fsdp"].values())) == {("S(0)",)}
    assert held["tensor_parallel"][f"{attention}.q_proj.weight"] == ["S(0)"]
    assert held["tensor_parallel"][f"{attention}.o_proj.weight"] == ["S(1)"]
    assert held["tensor_parallel"]["lm_head.weight"] == ["S(0)"]
    assert held["tensor_parallel"]["model.norm.weight"] == ["R"]
