"""Worker processes with a deadline for each job.

One thread of the driver serves one worker: it sends a job, waits for the reply no longer than the deadline, and replaces a
worker that is late or dead. So a job is charged only with what it did itself: waiting in the queue is free, and the death
of an idle worker costs nothing. Quick jobs are handed over several at a time; they are done and charged one by one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

from rl_tpu.errors import RunError
from rl_tpu.rewards.worker import Job, Score, Setup

WORKER_START_S = 120.0
"""Longest wait for a new worker to import the reward functions, on a busy machine."""
HANG_UP_S = 5.0
HANDOVERS = 4
HANDFUL_S = 0.005
"""Jobs that are handed over together should take so long at most: beside that a message to the worker costs nothing."""

Item = tuple[Job, "Future[list[Score]]"]


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
        self._queue: deque[Item] = deque()
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
        for item in self._queue:
            self._settle(item, None)
        self._queue.clear()

    def _serve(self) -> None:
        """A thread's life. The worker dies with it: `_die_with_driver` is about the thread that started the process."""
        worker, job_s = None, HANDFUL_S
        with suppress(RunError):  # it is tried again with the first job, which hears of it
            worker = self._launch()
        while items := self._next(int(HANDFUL_S / job_s)):
            began, number = time.monotonic(), len(items)
            try:
                handful = ForkingPickler.dumps([job for job, _ in items])
                idle, worker = worker, None
                worker = self._hand_over(handful, idle)
                while items:
                    self._settle(items[0], worker.receive(self._timeout_s))
                    del items[0]
            except (TimeoutError, WorkerDied) as failure:
                self._retire(worker)
                worker = None
                self._settle(items.pop(0), failure)
            except Exception as failure:  # a job that cannot be pickled or unpickled: which, is told by it alone
                if number == 1:
                    self._settle(items.pop(0), failure)
            job_s = HANDFUL_S if items else (time.monotonic() - began) / number
            self._give_back(items)
        self._retire(worker)

    def _hand_over(self, handful: memoryview, worker: _Worker | None) -> _Worker:
        """The worker that has the jobs: the given one, or a new one if that is gone. Raises RunError."""
        for _ in range(HANDOVERS):
            worker = worker or self._launch()
            if worker.takes(handful):
                return worker
            self._retire(worker)
            worker = None
        raise RunError(f"{HANDOVERS} reward workers died of a job before they had it; their output is above")

    def _next(self, most: int) -> list[Item]:
        """The next jobs, which leave as many to each of the other workers; none once the pool is closed."""
        items: list[Item] = []
        with self._changed:
            while not items:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    break
                number = max(1, min(most, len(self._queue) // len(self._threads)))
                items = [self._queue.popleft() for _ in range(number)]
                items = [(job, future) for job, future in items if not future.cancelled()]
        return items

    def _give_back(self, items: list[Item]) -> None:
        """They are the next ones again."""
        with self._changed:
            self._queue.extendleft(reversed(items))
            self._changed.notify_all()

    def _settle(self, item: Item, outcome: object) -> None:
        future = item[1]
        if not future.set_running_or_notify_cancel():
            return
        if self._closed:
            outcome = RunError("the reward service is closed")
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

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

    def takes(self, handful: memoryview) -> bool:
        """Hand over pickled jobs; False if it died before it had them. Then `receive` brings the scores of each in turn."""
        try:
            self.connection.send_bytes(handful)
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
