"""The collective of all trainer ranks, in a real Ray; and ranks that do not come are named."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.placement import Placement
from rl_tpu.orchestrator.preflight import collective
from rl_tpu.orchestrator.preflight.collective import Missing, end_ranks, start_ranks, sum_over_ranks
from rl_tpu.trainer.group import rank_environments


@pytest.fixture(scope="module")
def config():
    chips = ["cluster.chips_per_host=3", "cluster.trainer_chips=2", "cluster.cpus_per_chip=0.5"]
    return load_config(["+experiment=quickstart", *chips, "preflight.collective_timeout_s=30"])


@pytest.fixture(scope="module")
def placement(config):
    with Placement(config, roles=("trainer",)) as placement:
        yield placement


@pytest.fixture(scope="module")
def ranks(config, placement, tmp_path_factory):
    """Two ranks for the tests below, in this order: the last one ends one of them."""
    ranks = start_ranks(config, placement.trainer_options(), tmp_path_factory.mktemp("logs"))
    yield ranks
    end_ranks(ranks.actors)


def impatient(config):
    return config.model_copy(update={"preflight": config.preflight.model_copy(update={"collective_timeout_s": 3.0})})


def name(ranks, rank: int) -> str:
    return f"trainer rank {rank} on {socket.gethostname()} ({ranks.places[rank].address}, process {ranks.places[rank].pid})"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_named(config, ranks, rank):
    os.kill(ranks.places[rank].pid, signal.SIGSTOP)
    try:
        with pytest.raises(Missing) as caught:
            sum_over_ranks(impatient(config), ranks)
    finally:
        os.kill(ranks.places[rank].pid, signal.SIGCONT)
    assert str(caught.value) == f"{name(ranks, rank)} did not answer within 3 s"


def test_all_ranks_add_up(config, ranks):
    assert len({place.pid for place in ranks.places}) == 2
    assert 0 < sum_over_ranks(config, ranks) < 30


def test_a_rank_that_died_is_named(config, ranks):
    os.kill(ranks.places[1].pid, signal.SIGKILL)
    with pytest.raises(Missing) as caught:
        sum_over_ranks(config, ranks)
    assert str(caught.value) == f"{name(ranks, 1)} died"
    end_ranks(ranks.actors)


def test_a_rank_that_cannot_reach_the_first_one_is_named(config, placement, tmp_path, monkeypatch):
    ranks = start_ranks(config, placement.trainer_options(), tmp_path)
    first, second = rank_environments(config, ranks.places)
    with socket.create_server(("", 0)) as server:
        closed = str(server.getsockname()[1])
    monkeypatch.setattr(collective, "rank_environments", lambda *_: [first, second | {"MASTER_PORT": closed}])
    try:
        with pytest.raises(Missing) as caught:
            sum_over_ranks(impatient(config), ranks)
    finally:
        end_ranks(ranks.actors)
    assert str(caught.value).startswith(f"{name(ranks, 1)} did not come within 3 s")


def test_a_rank_that_cannot_start_is_named_with_the_hosts_there_are(config, placement, tmp_path):
    options = placement.trainer_options()
    options[1] = {"num_cpus": 64}
    with pytest.raises(Missing) as caught:
        start_ranks(impatient(config), options, tmp_path)
    assert "trainer rank 1 did not answer within 3 s" in str(caught.value)
    assert str(caught.value).endswith(f"Ray's hosts are {socket.gethostname()}")
