"""Launch environments and resources of each kind of device, and torchtitan's detection."""

import subprocess
import sys

import pytest
import torch

from rl_tpu.devices import DEVICES, get_device
from rl_tpu.errors import UserError

RANKS = dict(
    rank=3, local_rank=1, world_size=4, local_world_size=4, threads=2, master_address="10.0.0.1", master_port=29500
)


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="cpu, cuda, tpu"):
        get_device("gpu")


@pytest.mark.parametrize("name", DEVICES)
def test_every_rank_learns_who_it_is(name):
    environment = get_device(name).rank_environment(**RANKS)
    assert environment["RANK"] == "3"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == "4"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert environment["OMP_NUM_THREADS"] == "2"
    assert all(isinstance(value, str) for value in environment.values())


def test_ranks_see_the_chips_that_train():
    assert get_device("cuda").rank_environment(**RANKS, chips=[0, 1])["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in get_device("cuda").rank_environment(**RANKS)


def test_resources_name_the_chip_only_where_there_is_one():
    assert get_device("cpu").ray_resources(2, 0.5) == {"CPU": 1.0}
    assert get_device("cuda").ray_resources(2, 4) == {"CPU": 8, "GPU": 2}


def test_ray_may_count_the_devices_of_a_tpu_instead_of_its_chips(monkeypatch):
    assert get_device("tpu").ray_resources(2, 4) == {"CPU": 8, "TPU": 2}
    monkeypatch.setenv("RAY_TPU_RESOURCE_PER_CHIP", "2")
    assert get_device("tpu").ray_resources(2, 4) == {"CPU": 8, "TPU": 4}


def test_an_engine_gets_one_group_of_cores_per_share():
    environment = get_device("cpu").engine_environment(threads=1, chips=[0, 1])
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert environment["OMP_NUM_THREADS"] == "1"


def test_cpu_memory_is_this_process():
    before = get_device("cpu").memory()
    block = torch.ones(16 << 20)
    after = get_device("cpu").memory()
    assert after.used_bytes - before.used_bytes > 0.9 * block.nbytes
    assert before.used_bytes <= after.peak_bytes < after.total_bytes


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_torchtitan_takes_the_device_it_is_told():
    done = run_python(
        "from rl_tpu.devices import get_device, prepare_torchtitan; prepare_torchtitan(get_device('cpu'));"
        "from torchtitan.distributed import parallel_dims; import torchtitan.models.qwen3;"
        "print(parallel_dims.device_type)"
    )
    assert done.stdout.strip().endswith("cpu"), done.stderr


def test_torchtitan_imported_too_early_is_an_error_not_a_wrong_device():
    done = run_python(
        "import torchtitan.distributed; from rl_tpu.devices import get_device, prepare_torchtitan;"
        "prepare_torchtitan(get_device('tpu'))"
    )
    assert "before it could be told to use tpu" in done.stderr
