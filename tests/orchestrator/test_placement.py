"""Which chips train and which write answers: a pure plan, and its reservation in a real Ray."""

import os

import pytest
import ray

from rl_tpu.config.compose import load_config
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.placement import Placement, Slot, plan


def quickstart(*overrides):
    return load_config(["+experiment=quickstart", *overrides])


def test_one_v7x_host_is_split_in_the_middle():
    slots = plan(load_config(["+experiment=qwen3_4b_dapo", "rollout.engines=1", "rollout.tensor_parallel=4"]))
    assert slots == [Slot("trainer", 0, (0, 1), 4), Slot("rollout", 0, (2, 3), 4)]


def test_the_published_experiment_has_an_engine_on_each_rollout_chip():
    slots = plan(load_config(["+experiment=qwen3_4b_dapo"]))
    assert [(slot.chips, slot.devices) for slot in slots if slot.role == "rollout"] == [((2,), 2), ((3,), 2)]


def test_the_trainer_may_span_hosts_and_an_engine_may_not():
    hosts = [
        "weight_sync.transport=tests:other",
        "cluster.hosts=2",
        "cluster.chips_per_host=4",
        "cluster.trainer_chips=5",
        "cluster.rollout_chips=2",
    ]
    config = load_config(["+experiment=quickstart", *hosts, "rollout.engines=2", "rollout.prompts_per_step=20"])
    slots = plan(config)
    assert [(slot.role, slot.host, slot.chips) for slot in slots] == [
        ("trainer", 0, (0, 1, 2, 3)),
        ("trainer", 1, (0,)),
        ("rollout", 1, (1,)),
        ("rollout", 1, (2,)),
    ]
    split = ["cluster.trainer_chips=3", "rollout.engines=1", "rollout.tensor_parallel=2", "rollout.prompts_per_step=15"]
    with pytest.raises(UserError, match="two hosts"):
        plan(load_config(["+experiment=quickstart", *hosts[:3], *split, "cluster.rollout_chips=2"]))


def test_more_chips_than_the_machine_has_fails_at_once_with_the_numbers():
    cores = len(os.sched_getaffinity(0))
    config = quickstart(f"cluster.cpus_per_chip={cores}", "cluster.start_timeout_s=60")
    with pytest.raises(UserError, match=rf"needs {2 * cores} CPU .* has {cores}"), Placement(config):
        pass
    assert not ray.is_initialized()


def test_an_unreachable_cluster_is_one_line():
    with pytest.raises(RunError, match=r"could not join the Ray cluster at '127\.0\.0\.1:1'") as caught:
        Placement(quickstart("cluster.address=127.0.0.1:1")).__enter__()
    assert "\n" not in str(caught.value)
