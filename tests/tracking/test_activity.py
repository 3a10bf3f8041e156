"""Overlapping activities beside sums worked out by hand, on a clock that is set by hand."""

from __future__ import annotations

import pytest

from rl_tpu.tracking import activity as module
from rl_tpu.tracking.activity import Activity


def test_seconds_go_to_the_first_kind_in_progress(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    activity = Activity("answering", "rewarding")
    now = 1.0  # nothing in progress
    with activity("answering"):
        now = 3.0
        with activity("answering"), activity("rewarding"):  # at once: counted once, and as the first kind
            now = 6.0
    with activity("rewarding"):
        now = 7.5
    now = 9.0
    assert activity.lap() == {"perf/answering_s": pytest.approx(5.0), "perf/rewarding_s": pytest.approx(1.5)}
    with activity("answering"):
        now = 10.0
        assert activity.lap()["perf/answering_s"] == pytest.approx(1.0)  # of what still goes on, too
        now = 10.5
    assert activity.lap() == {"perf/answering_s": pytest.approx(0.5), "perf/rewarding_s": 0.0}
