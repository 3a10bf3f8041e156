"""Processes of their own for ranks and engines; they run functions of test modules, whose ``state`` they keep."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Remote:
    """A spawned process that runs functions one after another; every wait has a deadline."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function, *args) -> None:
        self._connection.send((function, args))

    def finish(self, timeout_s: float = 60):
        assert self._connection.poll(timeout_s), f"no answer within {timeout_s} s"
        ok, result = self._connection.recv()
        if not ok:
            raise result
        return result

    def call(self, function, *args):
        self.start(function, *args)
        return self.finish()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._connection.close()


def _serve(connection) -> None:
    torch.set_num_threads(1)
    state = {}
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(state, *args)))
        except Exception as error:
            connection.send((False, error))


def join(state, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    state.update(rank=rank, world_size=world_size, group=dist.group.WORLD)


def start_ranks(world_size: int, rendezvous: Path) -> list[Remote]:
    """A trainer's ranks joined by gloo; one alone has no process group. ``rendezvous`` is a file that is not there."""
    ranks = [Remote() for _ in range(world_size)]
    if world_size > 1:
        for rank, remote in enumerate(ranks):
            remote.start(join, rank, world_size, str(rendezvous), 120)
        for remote in ranks:
            remote.finish(120)
    return ranks


def on_all(ranks: list[Remote], function, *args) -> list:
    """Results of all ranks; raises the first error when all have answered, so that no answer is left for later."""
    for rank in ranks:
        rank.start(function, *args)
    results, errors = [], []
    for rank in ranks:
        try:
            results.append(rank.finish(120))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
