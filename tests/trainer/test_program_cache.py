"""Compiled programs are found again by the next run, by all its ranks alike; other versions and topologies have their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray
from tiny_policy import make_samples, trainer_config

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.job import run_job
from rl_tpu.trainer import program_cache
from rl_tpu.trainer.compilations import KeptPrograms
from rl_tpu.trainer.group import TrainerGroup, rank_environments
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.rank import Place

TWO_CHIPS = {"device": "cpu", "chips_per_host": 3, "trainer_chips": 2, "rollout_chips": 1}
V7X = {"device": "tpu", "generation": "v7x", "chips_per_host": 4, "devices_per_chip": 2, "trainer_chips": 2}


def run_config(model_dir: Path, cache: Path | str | None, **cluster) -> RunConfig:
    execution = {"mode": "compile", "cache": None if cache is None else str(cache)}
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"path": str(model_dir)},
            "data": {"train": {"kind": "reasoning_gym", "task": "chain_sum", "size": 10}},
            "reward": {"name": "reasoning_gym"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 40},
            "trainer": trainer_config(step_timeout_s=900).model_dump() | {"execution": execution},
            "cluster": TWO_CHIPS | cluster,
        }
    )


def key(**cluster) -> str:
    return program_cache.directory(run_config(Path("model"), "programs", **cluster)).name


def test_other_versions_and_topologies_have_their_own_directory(monkeypatch):
    names = [key(), key(trainer_chips=1), key(hosts=2), key(**V7X), key(**V7X | {"generation": "v6e"})]
    assert key() == names[0]
    installed = program_cache.version
    for package in ("torch", "torch_tpu", "libtpu"):
        monkeypatch.setattr(program_cache, "version", lambda name, it=package: "9" if name == it else installed(name))
        names.append(key(**V7X))
    assert key() == names[0], "libtpu compiles nothing for a CPU"
    monkeypatch.setattr(program_cache, "__version__", "9")
    assert len({*names, key()}) == len(names) + 1


def test_every_rank_is_told_the_same_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_TPU_CACHE", str(tmp_path))
    places = [Place(node, 40 + rank, f"10.0.0.{node}", 1000 + rank) for rank, node in enumerate("1122")]
    for cluster, name in ((TWO_CHIPS, "TORCHINDUCTOR_CACHE_DIR"), (V7X, "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT")):
        config = run_config(tmp_path, "auto", **cluster)
        (told,) = {environment[name] for environment in rank_environments(config, places)}
        assert Path(told) == program_cache.directory(config)
        assert Path(told).parent == tmp_path / "programs"
        without = rank_environments(run_config(tmp_path, None, **cluster), places)
        assert not any(name in environment for environment in without)


def test_a_directory_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    config = load_config(["+experiment=quickstart", f"trainer.execution.cache={tmp_path}/file/programs"])
    with pytest.raises(UserError, match=r"trainer.execution.cache .*/file/programs: .* cannot be written \(Not a dir"):
        run_job(config)
    assert not ray.is_initialized()


def test_on_a_tpu_the_first_rank_counts_what_appears_in_the_directory(monkeypatch, tmp_path):
    device = get_device("tpu")
    monkeypatch.setenv(device.program_cache_variable, str(tmp_path))
    (tmp_path / "old").touch()
    programs = KeptPrograms(device)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "new").touch()
    assert programs.since_last() == {"cache_misses": 1}
    assert programs.since_last() == {"cache_misses": 0}
    config = run_config(tmp_path, tmp_path, **V7X)
    says = f"programs: 3 new in the cache {program_cache.directory(config)}"
    assert program_cache.summary(config, {"train/cache_misses": 3.0}) == says
    monkeypatch.setenv("RANK", "1")
    programs = KeptPrograms(device)
    (tmp_path / "below" / "newest").touch()
    assert programs.since_last() == {"cache_misses": 0}


def test_without_a_directory_nothing_is_said(tmp_path):
    config = run_config(tmp_path, None)
    program_cache.check_writable(config)
    assert program_cache.summary(config, {}) is None


@pytest.fixture
def ray_started():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_the_second_run_finds_what_the_first_compiled_and_ranks_share_it(ray_started, model_dir, tmp_path):
    config = run_config(model_dir, tmp_path / "programs")
    kept = program_cache.directory(config)
    batch = pack(make_samples(1) * 8, [64], 2, 128)  # on a CPU the first program is that of the rank's own lengths

    async def run(name: str) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of a run's first two steps."""
        group = await TrainerGroup.start(config, model_dir, tmp_path, name, [{"num_cpus": 0.5}] * 2)
        try:
            return await group.learn([batch]), await group.learn([batch])
        finally:
            await group.close()

    first, later = asyncio.run(run("first"))
    again, _ = asyncio.run(run("again"))
    programs = len(list(kept.glob("fxgraph/*/*")))  # one directory for every key
    assert programs > 0
    # Ranks with keys of their own would have made twice as many, each half as often asked for.
    assert first["train/cache_misses"] + first["train/cache_hits"] == 2 * programs
    assert first["train/cache_misses"] >= programs
    assert later["train/cache_misses"] == later["train/cache_hits"] == 0
    assert (again["train/cache_misses"], again["train/cache_hits"]) == (0, 2 * programs)
    assert again["train/loss"] == first["train/loss"]
    assert program_cache.summary(config, again) == f"programs: 0 compiled, {2 * programs} from the cache {kept}"
