"""The prefix cache under changing policies, in SGLang's scheduler processes.

A sample in flight may keep its key-value entries over an update, so the cache cannot always be flushed, and what such a
sample leaves behind was computed by two policies. Every load therefore opens a name space of its own in the cache
(SGLang's ``extra_key``): a request belongs to the one that was open when it last had nothing computed, and finds only
prefixes that were computed since.
"""

from __future__ import annotations

from typing import Any

_loads = 0
"""Policies loaded by this process; not versions, because a version can be loaded again."""


def open_name_space(scheduler: Any) -> None:
    """A new policy was loaded: requests that wait with nothing computed are its own."""
    global _loads
    _loads += 1
    for request in scheduler.waiting_queue:
        _assign(request)


def register_hooks() -> None:
    """Called in each of SGLang's processes before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", _queue, HookType.BEFORE)


def _queue(scheduler: Any, request: Any, *args: Any, **options: Any) -> None:
    """New requests come this way, and those that gave up their entries, for an update or for want of memory."""
    _assign(request)


def _assign(request: Any) -> None:
    if not request.kv.holds_kv:
        request.extra_key = f"load {_loads}"
