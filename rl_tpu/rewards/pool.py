"""Worker processes with a deadline for each job.

One thread of the driver serves one worker: it sends a job, waits for the reply no longer than the deadline, and replaces a
worker that is late or dead. So a job is charged only with what it did itself: waiting in the queue is free, and the death
of an idle worker costs nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

from rl_tpu.errors import RunError
from rl_tpu.rewards.worker import Job, Score, Setup

WORKER_START_S = 120.0
"""Longest wait for a new worker to import the reward functions, on a busy machine."""
HANG_UP_S = 5.0
HANDOVERS = 4


class WorkerDied(Exception):
    """The process ended while it had a job; ``exit_code`` is negative for a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class WorkerPool:
    """``workers`` processes, started at once, that do jobs in the order of `submit`."""

    def __init__(self, workers: int, timeout_s: float, setup: Setup) -> None:
        self._timeout_s = timeout_s
        self._setup = setup
        self._queue: deque[tuple[Job, Future[list[Score]]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: set[_Worker] = set()
        self._threads = [threading.Thread(target=self._serve, name="reward", daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[list[Score]]:
        """The job's scores; TimeoutError past the deadline, WorkerDied, or RunError if no worker comes up."""
        future: Future[list[Score]] = Future()
        with self._changed:
            if self._closed:
                raise RunError("the reward service is closed")
            self._queue.append((job, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End all workers, whatever they do; none is left when this returns. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._running:
                worker.kill()
        for thread in self._threads:
            thread.join()
        for _, future in self._queue:
            _settle(future, RunError("the reward service is closed"))
        self._queue.clear()

    def _serve(self) -> None:
        """A thread's life. The worker dies with it: `_die_with_driver` is about the thread that started the process."""
        worker = None
        with suppress(RunError):  # it is tried again with the first job, which hears of it
            worker = self._launch()
        while (item := self._next()) is not None:
            job, future = item
            if future.cancelled():
                continue
            try:
                for _ in range(HANDOVERS):
                    if worker is not None and worker.takes(job):
                        break
                    self._retire(worker)
                    worker = None
                    worker = self._launch()
                else:
                    raise RunError(
                        f"{HANDOVERS} reward workers died of a job before they had it; their output is above"
                    )
                outcome = worker.receive(self._timeout_s)
            except (TimeoutError, WorkerDied) as failure:
                self._retire(worker)
                worker, outcome = None, failure
            except Exception as failure:  # no worker came up, or the job cannot be pickled
                outcome = failure
            _settle(future, RunError("the reward service is closed") if self._closed else outcome)
        self._retire(worker)

    def _next(self) -> tuple[Job, Future[list[Score]]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()

    def _launch(self) -> _Worker:
        with self._changed:
            if self._closed:
                raise RunError("the reward service is closed")
            worker = _Worker()
            self._running.add(worker)
        try:
            worker.prepare(self._setup)
        except (TimeoutError, WorkerDied, OSError) as error:
            self._retire(worker)
            code = f"ended with exit code {error.exit_code}" if isinstance(error, WorkerDied) else "did not get ready"
            raise RunError(f"a reward worker {code} while it started; its output is above") from None
        return worker

    def _retire(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            with self._changed:
                self._running.discard(worker)


class _Worker:
    """One process and the socket to it."""

    def __init__(self) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        # Started afresh, not forked: it has no business with the driver's Ray, gRPC and torch threads.
        entry = f"import sys; sys.path[:] = {sys.path!r}; from rl_tpu.rewards import worker; worker.main({far_end.fileno()})"
        command = [sys.executable, "-c", entry]
        # In a group of its own: whatever a function starts ends with it, and Ctrl-C is the driver's business.
        self.process = subprocess.Popen(command, pass_fds=[far_end.fileno()], stdin=subprocess.DEVNULL, process_group=0)
        far_end.close()

    def prepare(self, setup: Setup) -> None:
        """Wait until it can take jobs. Raises TimeoutError or WorkerDied."""
        self.connection.send(setup)
        self.receive(WORKER_START_S)

    def takes(self, job: Job) -> bool:
        """Hand over a job; False if the worker died before it had it."""
        try:
            self.connection.send(job)
            self.receive(WORKER_START_S)
        except (ConnectionError, TimeoutError, WorkerDied):
            return False
        return True

    def receive(self, timeout_s: float) -> object:
        """Its next message. Raises TimeoutError or WorkerDied."""
        try:
            if not self.connection.poll(timeout_s):
                raise TimeoutError
            return self.connection.recv()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):  # it may have hung up without ending
                self.process.wait(HANG_UP_S)
            self.kill()
            raise WorkerDied(self.process.wait()) from None

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()


def _settle(future: Future, outcome: object) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
