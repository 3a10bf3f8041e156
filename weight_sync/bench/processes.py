"""Worker processes: spawned, told what to do over a pipe, waited for with a deadline, killed on failure."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

State = dict[str, Any]
CLOSE_TIMEOUT_S = 20


class WorkerError(Exception):
    """A worker failed, died, or did not answer in time. The message is one line."""


class Worker:
    """A process that runs functions ``function(state, *args)`` one after another; the state is its own."""

    def __init__(self, name: str):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=name)
        self._process.start()
        theirs.close()

    def start(self, function: Callable, *args: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # finish() says how it ended
            self._connection.send((function, args))

    def finish(self, deadline: float) -> Any:
        """The result of what was started; ``deadline`` is a time of time.monotonic()."""
        if not self._connection.poll(max(0, deadline - time.monotonic())):
            raise WorkerError(f"{self.name} did not answer in time")
        try:
            result, error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(CLOSE_TIMEOUT_S)
            raise WorkerError(f"{self.name} died with exit code {self._process.exitcode}") from None
        if error is not None:
            raise WorkerError(f"{self.name}: {error}")
        return result

    def hang_up(self) -> None:
        """Have it close what is open and end, once it is done with what it does."""
        self._connection.close()

    def close(self) -> None:
        """Hang up, wait until it has ended, kill it if it does not."""
        self.hang_up()
        self._process.join(CLOSE_TIMEOUT_S)
        self._process.kill()
        self._process.join()


def close_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    for worker in workers:
        worker.close()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which hangs up
    state: State = {}
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            answer = (function(state, *args), None)
        except Exception as error:
            traceback.print_exc()
            answer = (None, " ".join(f"{type(error).__name__}: {error}".split()))
        with contextlib.suppress(BrokenPipeError):
            connection.send(answer)
    for value in state.values():
        if hasattr(value, "close"):
            value.close()


def on_all(workers: Sequence[Worker], timeout_s: float, function: Callable, *args: Any) -> list[Any]:
    """The results of all workers, which run at the same time. Raises WorkerError for the first that failed."""
    return each(workers, timeout_s, function, [args] * len(workers))


def each(workers: Sequence[Worker], timeout_s: float, function: Callable, args: Iterable[tuple]) -> list[Any]:
    """As `on_all`, each worker with arguments of its own."""
    deadline = time.monotonic() + timeout_s
    for worker, own in zip(workers, args, strict=True):
        worker.start(function, *own)
    results, failure = [], None
    for worker in workers:
        try:
            results.append(worker.finish(deadline))
        except WorkerError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


# --- run in a worker ---


def join(state: State, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
    """A gloo group over the loopback interface, unless another one is chosen by environment."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout)
    state["group"] = dist.group.WORLD


def reset_peak_memory(state: State) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(state: State) -> int:
    """Largest resident size of this process [bytes] since the reset, mapped shared memory included."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def give_back_memory(state: State) -> None:
    """What was freed goes to the system, so that it is not taken for memory of what is measured next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
