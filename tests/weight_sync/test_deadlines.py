"""Calls without a deadline of their own get one."""

from __future__ import annotations

import os
import signal
import threading

import ici_processes as ici
import pytest
from remote_processes import Remote

from weight_sync import StaleHandleError
from weight_sync.deadlines import within


def test_a_call_has_its_result_or_its_error():
    assert within(60, lambda: 7) == 7
    assert within(60, lambda: None) is None
    with pytest.raises(FileNotFoundError, match="nowhere"):
        within(60, lambda: os.stat("/nowhere"))


def test_a_call_that_does_not_end_is_left_behind():
    released = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, released.wait)
    released.set()


def test_a_receiver_of_ici_does_not_wait_for_ever_for_a_frozen_sender(run_id):
    sender, engine = Remote(), Remote()
    try:
        sender.call(ici.open_ici, run_id, {})
        first = sender.call(ici.publish, 1, 1, "whole")
        engine.call(ici.open_ici_receiver, {"timeout_s": 3})
        engine.call(ici.receive, first)
        second = sender.call(ici.publish, 2, 2, "whole")
        os.kill(sender.process.pid, signal.SIGSTOP)
        with pytest.raises(StaleHandleError, match=r"version 2: the sender at .* is gone: no answer within 3 s"):
            engine.call(ici.receive, second)
        os.kill(sender.process.pid, signal.SIGCONT)
        engine.call(ici.receive, second)  # it was only frozen
    finally:
        engine.kill()
        sender.kill()
