"""Inside a reward worker process: load the function once, then score one sample per call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rl_tpu.registry import describe
from rl_tpu.rewards.registry import RewardFunction, find_reward, reward_parts
from rl_tpu.types import Prompt


@dataclass(frozen=True)
class Score:
    """One graded sample: its parts, or why the function failed; ``seconds`` were spent in the function."""

    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Loaded:
    function: RewardFunction
    part: str
    options: dict[str, Any]


_loaded: _Loaded | str = "the worker was not started"


def start(name: str, part: str, options: dict[str, Any], driver_pid: int) -> None:
    """Runs once in a new worker. A failure is kept and reported with the first sample: a pool only says "broken"."""
    global _loaded
    _die_with_driver(driver_pid)
    # The pool stops a late worker with SIGTERM; the default action does so at once, even inside C code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _loaded = _Loaded(find_reward(name, options), part, options)
    except Exception as error:
        _loaded = describe(error)


def score(text: str, answer: Any, prompt: Prompt) -> Score:
    """Grade one sample. Never raises what the reward function raised: exceptions of unknown types may not travel."""
    if isinstance(_loaded, str):
        return Score(error=_loaded)
    started = time.perf_counter()
    try:
        returned = _loaded.function(text, answer, prompt, **_loaded.options)
        parts = reward_parts(returned, _loaded.part)
    except BaseException as error:  # also SystemExit: a reward function must not end its worker quietly
        code = getattr(_loaded.function, "__code__", None)
        return Score(error=describe(error, code and code.co_filename), seconds=time.perf_counter() - started)
    return Score(parts, seconds=time.perf_counter() - started)


def _die_with_driver(driver_pid: int) -> None:
    """No worker outlives a driver that was killed. Linux only, like everything we run on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != driver_pid:  # it died before we asked
            os._exit(1)
