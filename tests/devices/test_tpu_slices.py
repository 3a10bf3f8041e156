"""Chips of TPU hosts as slices: who gets which, and what every process is told."""

import itertools
import math

import pytest

from rl_tpu.devices import get_device
from rl_tpu.devices.division import Block, Division
from rl_tpu.devices.generations import GENERATIONS, get_generation
from rl_tpu.devices.tpu_slices import divide, environments, slice_shape
from rl_tpu.errors import UserError


def v7x(trainer, engines, chips_per_engine=1, hosts=1, **more):
    return Division(hosts, 4, 2, trainer, engines, chips_per_engine, "v7x", **more)


def one_device(generation, chips_per_host, trainer, engines, chips_per_engine=1, hosts=1, **more):
    return Division(hosts, chips_per_host, 1, trainer, engines, chips_per_engine, generation, **more)


def told(division, addresses=("localhost",)):
    return environments(division, divide(division), addresses)


def devices(processes):
    return [int(process["TPU_VISIBLE_DEVICES"]) for process in processes]


def only(processes, name):
    """The one value that all processes have."""
    (value,) = {process[name] for process in processes}
    return value


def test_a_v7x_host_split_in_the_middle_is_two_slices():
    environment = told(v7x(2, 1, chips_per_engine=2))
    trainer, (engine,) = environment.trainer, environment.engines
    assert devices(trainer) == [0, 1, 2, 3]
    assert devices(engine) == [4, 5, 6, 7]
    for slice_, ports in ((trainer, range(8471, 8475)), (engine, range(8475, 8479))):
        assert only(slice_, "TORCH_TPU_TOPOLOGY") == "1,2,1,2"
        assert only(slice_, "TORCH_TPU_SLICEBUILDER_ADDRESSES") == ",".join(f"localhost:{port}" for port in ports)
        assert [process["LOCAL_RANK"] for process in slice_] == ["0", "1", "2", "3"]
        assert only(slice_, "TORCH_TPU_DEVICES_PER_HOST") == only(slice_, "WORLD_SIZE") == "4"


def test_a_v7x_host_split_one_to_three_has_an_engine_on_each_of_three_chips():
    environment = told(v7x(1, 3))
    assert devices(environment.trainer) == [0, 1]
    assert [devices(engine) for engine in environment.engines] == [[2, 3], [4, 5], [6, 7]]
    assert {only(engine, "TORCH_TPU_TOPOLOGY") for engine in environment.engines} == {"1,1,1,2"}


def test_an_engine_of_two_chips_leaves_the_chip_out_whose_neighbour_trains():
    assert divide(v7x(1, 1, chips_per_engine=2)).engines == (Block(0, (2, 3)),)


def test_a_v6e_machine_of_eight_chips_is_two_squares():
    environment = told(one_device("v6e", 8, trainer=4, engines=1, chips_per_engine=4))
    assert devices(environment.trainer) == [0, 1, 2, 3]
    assert devices(environment.engines[0]) == [4, 5, 6, 7]
    assert (
        only(environment.trainer, "TORCH_TPU_TOPOLOGY") == only(environment.engines[0], "TORCH_TPU_TOPOLOGY") == "2,2,1"
    )


def test_a_v5p_host_is_two_pairs():
    environment = told(one_device("v5p", 4, trainer=2, engines=2))
    assert only(environment.trainer, "TORCH_TPU_TOPOLOGY") == "1,2,1"
    assert [devices(engine) for engine in environment.engines] == [[2], [3]]
    assert environment.engines[0][0]["TORCH_TPU_TOPOLOGY"] == "1,1,1"


def test_of_two_hosts_one_trains_and_one_writes():
    environment = told(v7x(4, 4, hosts=2), ["10.0.0.1", "10.0.0.2"])
    assert devices(environment.trainer) == list(range(8))
    assert only(environment.trainer, "TORCH_TPU_TOPOLOGY") == "2,2,1,2"
    assert only(environment.trainer, "TPU_WORKER_HOSTNAMES") == "10.0.0.1"
    assert [devices(engine) for engine in environment.engines] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert only(environment.engines[3], "TORCH_TPU_SLICEBUILDER_ADDRESSES") == "10.0.0.2:8477,10.0.0.2:8478"


def test_of_eight_hosts_four_train_as_one_slice():
    addresses = [f"host{host}" for host in range(8)]
    environment = told(v7x(16, 4, chips_per_engine=4, hosts=8), addresses)
    trainer = environment.trainer
    assert only(trainer, "TORCH_TPU_TOPOLOGY") == "2,4,2,2"
    assert devices(trainer) == list(range(8)) * 4
    assert [process["LOCAL_RANK"] for process in trainer] == [str(rank % 8) for rank in range(32)]
    assert only(trainer, "TPU_WORKER_HOSTNAMES") == "host0,host1,host2,host3"
    peers = only(trainer, "TORCH_TPU_SLICEBUILDER_ADDRESSES").split(",")
    assert peers == [f"host{host}:{8471 + device}" for host in range(4) for device in range(8)]
    assert [only(engine, "TPU_WORKER_HOSTNAMES") for engine in environment.engines] == addresses[4:]


def test_weights_over_ici_need_one_slice_with_the_trainer_s_ranks_first():
    environment = told(v7x(2, 2, joined=True))
    everyone = [*environment.trainer, *itertools.chain(*environment.engines)]
    assert only(everyone, "TORCH_TPU_TOPOLOGY") == "2,2,1,2"
    assert only(everyone, "WORLD_SIZE") == only(everyone, "TORCH_TPU_DEVICES_PER_HOST") == "8"
    assert [int(process["RANK"]) for process in everyone] == devices(everyone) == list(range(8))


def test_one_slice_over_two_hosts():
    environment = told(v7x(4, 2, chips_per_engine=2, hosts=2, joined=True), ["a", "b"])
    everyone = [*environment.trainer, *itertools.chain(*environment.engines)]
    assert only(everyone, "TORCH_TPU_TOPOLOGY") == "2,2,2,2"
    assert [int(process["RANK"]) for process in everyone] == list(range(16))
    assert devices(everyone) == [*range(8), *range(8)]


@pytest.mark.parametrize(
    ("division", "message"),
    [
        (
            v7x(3, 1),
            r"trainer_chips 3: 3 chips of v7x form no slice, 1, 2 or 4 do; 1 host\(s\) x 4 chips can be split as"
            r" trainer 1 \+ rollout 3, trainer 2 \+ rollout 2$",
        ),
        (
            v7x(1, 1, chips_per_engine=3),
            r"tensor_parallel 6 is 3 chips, .* takes 1, 2 or 4 of its 4 chips, .* is 2, 4 or 8$",
        ),
        (v7x(2, 2, chips_per_engine=2), r"rollout.engines 2 of 2 neighbouring chips do not fit beside .* 2, 1 do"),
        (
            one_device("v6e", 8, 2, 1),
            r"2 chips of v6e form no slice, 1, 4 or 8 do; .* trainer 1 \+ rollout 7, trainer 4 ",
        ),
        (v7x(6, 2, hosts=2), r"6 chips .* as trainer 1 \+ rollout 7, trainer 2 \+ rollout 6, trainer 4 \+ rollout 4$"),
        (v7x(4, 2, hosts=3), r"cluster.hosts 3 x chips_per_host 4: 12 chips of v7x form no slice, 1, 2, 4, 8 or 16 do"),
        (
            v7x(2, 1, joined=True),
            r"transport=ici needs .* one slice: .* 2 \+ rollout_chips 1 = 3 chips are none; 1, 2 or 4 are",
        ),
    ],
)
def test_an_impossible_division_is_one_line_with_the_possible_ones(division, message):
    with pytest.raises(UserError, match=message) as caught:
        divide(division)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("hosts", [2, 4, 8, 16, 64])
def test_the_first_hosts_of_a_slice_are_the_box_that_its_shape_says(name, hosts):
    generation = get_generation(name)
    whole, host = generation.shape(4 * hosts), generation.shape(4)
    grid = [range(a // b) for a, b in zip(whole, host, strict=True)]
    # Along x first, then y, then z: torch_tpu numbers the hosts of a slice so.
    places = sorted(itertools.product(*grid), key=lambda place: place[::-1])
    for some in (2**n for n in range(hosts.bit_length())):
        bounds = tuple((1 + max(place[axis] for place in places[:some])) * host[axis] for axis in range(3))
        assert math.prod(bounds) == 4 * some  # a box without holes
        assert slice_shape(generation, 4 * some, 4, hosts) == bounds


def test_other_devices_need_no_neighbours_and_tell_their_processes_nothing():
    cpu, division = get_device("cpu"), Division(1, 4, 1, trainer_chips=3, engines=1, chips_per_engine=1)
    divided = cpu.divide(division)
    assert (divided.trainer, divided.engines) == ((Block(0, (0, 1, 2)),), (Block(0, (3,)),))
    environment = cpu.environments(division, divided, ["localhost"])
    assert (environment.trainer, environment.engines) == (({}, {}, {}), (({},),))
