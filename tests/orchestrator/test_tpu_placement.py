"""Two TPU hosts in a real Ray, whose nodes only claim to have chips: reservation, order, environments."""

import json
import os
import re

import pytest
import ray
from ray.cluster_utils import Cluster

from rl_tpu.config.compose import load_config
from rl_tpu.devices.tpu_hosts import in_slice_order
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.dry_run import describe
from rl_tpu.orchestrator.placement import Placement, Slot, environments, plan

TWO_HOSTS = ["+experiment=qwen3_4b_dapo", "cluster=v7x_two_hosts", "weight_sync.transport=disk", "rollout.engines=4"]


@pytest.fixture(scope="module")
def hosts():
    """A v7x slice of 2x2x2, as Ray labels one; its second host is there first."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for worker in (1, 0):
        cluster.add_node(
            num_cpus=32,
            resources={"TPU": 4} | ({"TPU-v7x-16-head": 1} if worker == 0 else {}),
            labels={
                "ray.io/tpu-slice-name": "slice",
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-topology": "2x2x2",
                "ray.io/tpu-pod-type": "v7x-16",
            },
            env_vars={"TPU_NAME": "slice", "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": "tpu7x-16"},
        )
    yield cluster
    cluster.shutdown()


@ray.remote
class Process:
    def environment(self):
        return dict(os.environ)


def test_ranks_and_engines_start_on_their_hosts_with_their_devices(hosts):
    config = load_config([*TWO_HOSTS, f"cluster.address={hosts.address}"])
    with Placement(config) as placement:
        options = [placement.trainer_options()[7], placement.engine_options()[1]]
        processes = [Process.options(**each).remote() for each in options]
        trainer, engine = ray.get([process.environment.remote() for process in processes])
    assert (trainer["TPU_WORKER_ID"], trainer["TPU_VISIBLE_DEVICES"]) == ("0", "7")
    assert trainer["TORCH_TPU_TOPOLOGY"] == "2,2,1,2"
    assert engine["TPU_WORKER_ID"] == "1"
    workers = json.loads(engine["RL_TPU_WORKER_ENVIRONMENTS"])
    assert [worker["TPU_VISIBLE_DEVICES"] for worker in workers] == ["2", "3"]
    assert {worker["TORCH_TPU_TOPOLOGY"] for worker in workers} == {"1,1,1,2"}


def test_a_slice_that_is_not_there_is_one_line_with_those_that_are(hosts):
    config = load_config([*TWO_HOSTS, "cluster.hosts=4", f"cluster.address={hosts.address}"])
    missing = r"did not reserve a v7x slice of topology 2x2x4 \(4 hosts x 4 chips\): .* found: \['2x2x2'\]"
    with pytest.raises(RunError, match=missing), Placement(config):
        pass


def test_hosts_are_taken_in_the_order_of_their_slice():
    nodes = {
        name: {"Labels": {"ray.io/tpu-worker-id": worker}} for name, worker in [("a", "10"), ("b", "2"), ("c", "0")]
    }
    assert in_slice_order({0: "a", 1: "b", 2: "c"}, nodes) == (2, 1, 0)


def test_only_where_both_start_do_they_form_one_slice_for_ici():
    config = load_config(["+experiment=qwen3_4b_dapo", "weight_sync.transport=ici"])
    sizes = {
        roles: environments(config, ["localhost"], roles).trainer[0]["WORLD_SIZE"]
        for roles in (("trainer", "rollout"), ("trainer",))
    }
    assert sizes == {("trainer", "rollout"): "8", ("trainer",): "4"}


def test_a_dry_run_prints_what_every_process_is_told(capsys, tmp_path):
    describe(load_config(["+experiment=qwen3_4b_dapo"]), tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"trainer ranks 0-3: WORLD_SIZE=4 .*TORCH_TPU_TOPOLOGY=1,2,1,2 ", printed)
    assert "engine 1 worker 1: RANK=1 LOCAL_RANK=1 TPU_VISIBLE_DEVICES=7\n" in printed


@pytest.mark.parametrize(
    ("preset", "more", "trainer", "engine"),
    [
        ("v7x_host", ["rollout.engines=2"], (0, 1), Slot("rollout", 0, (3,), 2)),
        ("v7x_two_hosts", TWO_HOSTS[2:], (0, 1, 2, 3), Slot("rollout", 1, (3,), 2)),
        (
            "v6e_8",
            ["rollout.engines=1", "rollout.tensor_parallel=4"],
            (0, 1, 2, 3),
            Slot("rollout", 0, (4, 5, 6, 7), 4),
        ),
        ("v5p_host", ["rollout.engines=2", "rollout.tensor_parallel=1"], (0, 1), Slot("rollout", 0, (3,), 1)),
    ],
)
def test_every_preset_has_a_place_for_all(preset, more, trainer, engine):
    slots = plan(load_config(["+experiment=qwen3_4b_dapo", f"cluster={preset}", *more]))
    assert slots[0].chips == trainer
    assert slots[-1] == engine


@pytest.mark.parametrize("setting", ["chips_per_host=8", "devices_per_chip=1", "generation=v6e"])
def test_a_generation_that_does_not_agree_with_the_host_is_refused_with_all_three(setting):
    name, value = setting.split("=")
    now = {"generation": "v7x", "chips_per_host": "4", "devices_per_chip": "2"} | {name: value}
    line = "cluster.generation {generation}, chips_per_host {chips_per_host} and devices_per_chip {devices_per_chip} do not"
    with pytest.raises(UserError, match=line.format(**now)):
        load_config(["+experiment=qwen3_4b_dapo", f"cluster.{setting}"])
