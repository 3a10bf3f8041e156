"""The group of ranks through a real Ray: results, checkpoints, and what is said when a rank fails."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path

import pytest
import ray
import torch
from tiny_policy import make_samples, one_rank, trainer_config

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.group import TrainerGroup, merge_metrics, rank_environments, trainer_chips
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.rank import Place
from weight_sync import open_receiver

SHARED_MEMORY = Path("/dev/shm")


def run_config(model_dir: Path, **trainer) -> RunConfig:
    problems = {"kind": "reasoning_gym", "task": "chain_sum", "size": 10}
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"path": str(model_dir)},
            "data": {"train": problems},
            "reward": {"name": "reasoning_gym"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 40, "dtype": "bfloat16"},
            "trainer": trainer_config().model_dump() | trainer,
            "cluster": {"device": "cpu", "chips_per_host": 3, "trainer_chips": 2, "rollout_chips": 1},
        }
    )


@pytest.fixture(scope="module")
def ray_started():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_a_group_of_two_ranks_does_what_one_rank_does(ray_started, model_dir, tmp_path):
    batches = [pack(make_samples(8, seed), [64], 2, 128) for seed in (0, 1)]
    run_id = uuid.uuid4().hex[:8]

    async def use_group() -> dict:
        options = [{"num_cpus": 0.5}] * 2
        group = await TrainerGroup.start(run_config(model_dir), model_dir, tmp_path, run_id, options)
        (logprobs,) = await group.logprobs(batches[:1])
        seen = {"logprobs": logprobs}
        seen["metrics"] = await group.learn(batches)
        handle, seen["publish"] = await group.publish(1)
        with open_receiver("shared_memory").receive(handle) as received:
            seen["received"] = {name: tensor.clone() for name, tensor in received.tensors.items()}
        seen["tensors"] = await group.full_tensors()
        await group.save(tmp_path / "checkpoint")
        await group.learn(batches)
        await group.load(tmp_path / "checkpoint")
        seen["restored"] = await group.full_tensors()
        await group.export_hf(tmp_path / "hf")
        with pytest.raises(UserError, match="is not a checkpoint of this model"):
            await group.load(tmp_path / "nowhere")
        seen["after_bad_load"] = await group.full_tensors()
        one_row = batches[0].select(slice(0, 1))
        with pytest.raises(RunError, match=r"trainer rank [01] failed in learn: RunError: .*another number of ranks"):
            await group.learn([one_row])
        assert "Traceback" in (tmp_path / "logs" / "trainer-rank-0.log").read_text()
        seen["after_bad_batch"] = await group.full_tensors()
        await group.close()
        with pytest.raises(RunError, match="closed"):
            await group.learn(batches)
        return seen

    seen = asyncio.run(use_group())
    with one_rank(model_dir) as trainer:
        logprobs = trainer.logprobs(batches[0], only_loss=True)
        metrics = merge_metrics([trainer.update(batch) for batch in batches])
        tensors = {name: tensor.bfloat16() for name, tensor in trainer.full_tensors().items()}
    torch.testing.assert_close(seen["logprobs"], logprobs, rtol=0, atol=1e-5)
    assert 0 < seen["metrics"].pop("train/padding_share") < 0.5
    assert 1 <= seen["metrics"].pop("train/rank_imbalance") < 1.2
    for some in (seen["metrics"], metrics):
        assert some.pop("train/tokens_per_s") > 0
        assert 0.1 < some.pop("train/peak_memory_gb") < 20
    assert seen["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert seen["tensors"].keys() == tensors.keys()
    for name, tensor in seen["tensors"].items():
        torch.testing.assert_close(tensor, tensors[name], rtol=2**-7, atol=1e-4)
        assert torch.equal(tensor, seen["received"][name])
        assert torch.equal(tensor, seen["restored"][name])
        assert torch.equal(tensor, seen["after_bad_load"][name])
        assert torch.equal(tensor, seen["after_bad_batch"][name])
    assert seen["publish"].keys() == {"sync/publish_s"}
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert not [path for path in SHARED_MEMORY.iterdir() if run_id in path.name]


def test_a_rank_that_dies_is_named_and_nothing_waits_for_it(ray_started, model_dir, tmp_path):
    batch = pack(make_samples(8), [64], 2, 128)

    async def lose_one() -> None:
        options = [{"num_cpus": 0.5}] * 2
        group = await TrainerGroup.start(run_config(model_dir), model_dir, tmp_path, "lost", options)
        try:
            pids = [place.pid for place in group._places]
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(RunError, match=rf"rank 1 \(process {pids[1]} on .*\) died in learn; log: .*rank-1.log"):
                await group.learn([batch])
            with pytest.raises(RunError, match="rank 1 died"):
                await asyncio.wait_for(group.save(tmp_path / "checkpoint"), 1)
        finally:
            await asyncio.wait_for(group.close(), 15)
        assert await gone(pids[0])

    asyncio.run(lose_one())


async def gone(pid: int) -> bool:
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return True
        await asyncio.sleep(0.1)
    return False


def test_a_model_the_trainer_does_not_know_is_the_users_error(ray_started, model_dir, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UserError, match=r"MambaForCausalLM is unknown; known: .*Qwen3ForCausalLM"):
        asyncio.run(TrainerGroup.start(run_config(tmp_path), tmp_path, tmp_path, "unknown", [{"num_cpus": 0.5}]))


def test_a_trainer_that_cannot_be_placed_is_reported_in_time(ray_started, model_dir, tmp_path):
    config = run_config(model_dir, start_timeout_s=2)
    with pytest.raises(RunError, match=r"did not start within trainer.start_timeout_s = 2 s"):
        asyncio.run(TrainerGroup.start(config, model_dir, tmp_path, "large", [{"num_cpus": 64}]))


def test_metrics_of_several_steps():
    one = {"train/loss": 1.0, "train/ratio_max": 3.0, "train/tokens": 10.0, "train/tokens_per_s": 5.0}
    two = {"train/loss": 2.0, "train/ratio_max": 2.0, "train/tokens": 30.0, "train/tokens_per_s": 30.0}
    one |= {
        "train/learning_rate": 1e-3,
        "train/logprob_diff_max": 0.1,
        "train/skipped_updates": 1.0,
        "train/early_stops": 0.0,
    }
    two |= {
        "train/learning_rate": 1e-4,
        "train/logprob_diff_max": 9.0,
        "train/skipped_updates": 0.0,
        "train/early_stops": 0.0,
    }
    assert merge_metrics([one, two]) == {
        "train/loss": 1.5,
        "train/ratio_max": 3.0,
        "train/tokens": 40.0,
        "train/tokens_per_s": pytest.approx(40 / 3),
        "train/learning_rate": 1e-4,
        "train/logprob_diff_max": 0.1,
        "train/skipped_updates": 1.0,
        "train/early_stops": 0.0,
        "train/updates": 1.0,
    }


def test_ranks_are_counted_within_their_host_and_meet_at_rank_zero(model_dir):
    places = [Place(node, 40 + i, f"10.0.0.{node}", 1000 + i) for i, node in enumerate("1122")]
    environments = rank_environments(run_config(model_dir), places)
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0", "1"]
    assert {e["LOCAL_WORLD_SIZE"] for e in environments} == {"2"}
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments} == {("10.0.0.1", "1000")}


def test_the_trainer_takes_the_first_chips_of_the_cluster(model_dir):
    cluster = run_config(model_dir).cluster.model_copy(update={"hosts": 2, "chips_per_host": 4, "trainer_chips": 6})
    assert [trainer_chips(cluster, host) for host in (0, 1)] == [[0, 1, 2, 3], [0, 1]]
