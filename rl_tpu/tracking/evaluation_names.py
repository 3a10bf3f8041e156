"""Which of an evaluation's metrics a reader sees first; the files have them all."""

from __future__ import annotations

import re
from collections.abc import Iterable

PASS_AT = re.compile(r"pass@(\d+)")
DETAIL = re.compile(r".*_(low|high|p50|p90|max)|mean@\d+")
"""Bounds of intervals, details of distributions, and pass@1 by its other name."""


def headline(names: Iterable[str]) -> list[str]:
    """Mean reward, pass@1, pass@k of the largest k, and the majority vote, of those that there are; else all but details."""
    names = list(names)
    largest = max((int(match[1]) for name in names if (match := PASS_AT.fullmatch(name))), default=1)
    wanted = {"reward_mean", "pass@1", f"pass@{largest}"}
    return [name for name in names if name in wanted or name.startswith("maj@")] or without_details(names)


def without_details(names: Iterable[str]) -> list[str]:
    """All names but `DETAIL`."""
    return [name for name in names if not DETAIL.fullmatch(name)]
