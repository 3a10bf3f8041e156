"""Inside a reward worker process: load the functions once, then do one job after the other.

A process runs `main` on a socket to the driver (`rl_tpu.rewards.pool`): a `Setup` comes in, `READY` goes out; then for every
list of `Job` first `READY`, so that the driver knows who has them, and then a list of `Score` for each.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from rl_tpu.registry import describe
from rl_tpu.rewards.plan import Term
from rl_tpu.rewards.registry import Response, RewardFunction, find_reward, reward_parts
from rl_tpu.types import Prompt

READY = "ready"
OUT_OF_MEMORY_EXIT_CODE = 77
Failure = Literal["timeouts", "crashes", "errors"]
"""How a sample got no reward, as `RewardStats` counts it."""


@dataclass(frozen=True)
class Setup:
    """What a worker needs before its first job."""

    terms: tuple[Term, ...]
    memory_bytes: int | None
    driver_pid: int


@dataclass(frozen=True)
class Job:
    """Score each of ``responses`` by each of the terms at these positions."""

    terms: tuple[int, ...]
    responses: list[Response]
    prompt: Prompt


@dataclass
class Score:
    """One graded response: its weighted parts, or why it has none; ``seconds`` were spent in functions."""

    parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    error: str | None = None
    seconds: float = 0.0


def main(descriptor: int) -> None:
    """Serve the driver at the other end of the socket until it hangs up."""
    driver = Connection(descriptor)
    setup: Setup = driver.recv()
    _die_with_driver(setup.driver_pid)
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    loaded = [_load(term) for term in setup.terms]
    process = os.getpid()
    driver.send(READY)
    while True:
        try:
            jobs: list[Job] = driver.recv()
        except EOFError:
            return
        driver.send(READY)
        for job in jobs:
            scores = _do(job, setup.terms, loaded)
            if os.getpid() != process:  # a function forked, and its copy came back too: one of them answers
                os._exit(0)
            driver.send(scores)


def _load(term: Term) -> RewardFunction | str:
    """A failure is kept as text and reported with the first sample."""
    try:
        return find_reward(term.name, term.options)
    except Exception as error:
        return describe(error)


def _do(job: Job, terms: tuple[Term, ...], loaded: list[RewardFunction | str]) -> list[Score]:
    """Never raises what a function raised: exceptions of unknown types may not travel."""
    scores = [Score() for _ in job.responses]
    for position in job.terms:
        term, function = terms[position], loaded[position]
        if term.scope == "group":
            _score(scores, term, function, job.responses, job.prompt)
        else:
            for score, response in zip(scores, job.responses, strict=True):
                _score([score], term, function, response if term.scope == "response" else response.text, job.prompt)
    return scores


def _score(scores: list[Score], term: Term, function: RewardFunction | str, given: Any, prompt: Prompt) -> None:
    """Add one function's weighted parts, or its failure, to each score."""
    started = time.perf_counter()
    try:
        if isinstance(function, str):
            raise RuntimeError(function)
        returned = function(given, prompt.answer, prompt, **term.options)
        entries = _one_each(returned, len(scores)) if term.scope == "group" else [returned]
    except MemoryError:
        os._exit(OUT_OF_MEMORY_EXIT_CODE)  # too little is left to go on with
    except BaseException as error:  # also SystemExit: a reward function must not end its worker quietly
        entries = [error] * len(scores)
    seconds = (time.perf_counter() - started) / len(scores)
    for score, entry in zip(scores, entries, strict=True):
        score.seconds += seconds
        try:
            if isinstance(entry, BaseException):
                raise entry
            for name, value in reward_parts(entry, term.label).items():
                score.parts[name] = score.parts.get(name, 0.0) + term.weight * value
        except BaseException as error:
            if score.error is None:
                score.failure, score.error = "errors", f"{term.name}: {_describe(error, function)}"


def _describe(error: BaseException, function: RewardFunction | str) -> str:
    if isinstance(function, str):
        return function
    code = getattr(function, "__code__", None)
    return describe(error, code and code.co_filename)


def _one_each(returned: Any, count: int) -> list:
    if not isinstance(returned, (list, tuple)) or len(returned) != count:
        got = f"{len(returned)} rewards" if isinstance(returned, (list, tuple)) else repr(returned)
        raise ValueError(f"returned {got}, not a list with one reward for each of {count} responses")
    return list(returned)


def _die_with_driver(driver_pid: int) -> None:
    """No worker outlives a driver that was killed. Linux only, like everything we run on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != driver_pid:  # it died before we asked
            os._exit(1)
