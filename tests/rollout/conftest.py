"""Real engines, as few as possible: one for the tests of an engine, two for the tests of the fleet."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
import ray
from tiny import make_config, make_model

from rl_tpu.rollout.fleet import Fleet
from rl_tpu.rollout.sglang import SGLangEngine
from weight_sync import Shard, open_sender, remove_segments


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> dict[str, Path]:
    """``untied`` and ``tied`` output layers."""
    root = tmp_path_factory.mktemp("rollout-models")
    make_model(root / "untied", seed=0, tied=False)
    make_model(root / "tied", seed=1, tied=True)
    return {"untied": root / "untied", "tied": root / "tied"}


@pytest.fixture(scope="module")
def local_ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def run():
    """Runs a coroutine; all on one event loop, to which the engines' connections belong."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(model_dirs, local_ray, run, tmp_path_factory):
    """One engine with the untied model."""
    model_dir = model_dirs["untied"]
    start = SGLangEngine.start(make_config(model_dir), model_dir, tmp_path_factory.mktemp("run"), 0, {"num_cpus": 0})
    engine = run(start)
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def fleet(model_dirs, local_ray, run, tmp_path_factory):
    """Two engines with the tied model."""
    model_dir = model_dirs["tied"]
    config = make_config(model_dir, rollout={"engines": 2})
    fleet = run(Fleet.start(config, model_dir, tmp_path_factory.mktemp("run"), [{"num_cpus": 0}] * 2))
    yield fleet
    run(fleet.close())


@pytest.fixture
def run_id():
    """Names the segments a test publishes; they are gone afterwards."""
    run_id = f"rollout-{secrets.token_hex(4)}"
    yield run_id
    remove_segments(run_id)


@pytest.fixture
def publish(run_id):
    """Publishes named tensors under a version; the sender keeps two versions."""
    sender = open_sender("shared_memory", run_id=run_id)
    yield lambda version, tensors: sender.publish(version, [Shard.whole(*item) for item in tensors.items()])
    sender.close()
