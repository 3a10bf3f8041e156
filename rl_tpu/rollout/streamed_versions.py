"""What SGLang streams of an unfinished sample.

With the tokens, which policy wrote them: it tells that of finished ones only, but a sample that another engine has to finish
needs it, too. And nothing before there are as many as were asked for: it sends the first token of every sample at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_hooks() -> None:
    """Called in each of SGLang's processes before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    streamer = "sglang.srt.managers.scheduler_components.output_streamer"
    HookRegistry.register(f"{streamer}._GenerationStreamAccumulator.accept", _accept, HookType.AROUND)


def _accept(accept: Callable[..., None], outputs: Any, *, req: Any) -> None:
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    interval = req.sampling_params.stream_interval
    if interval and not req.finished() and len(req.output_ids) - req.send_token_offset < interval:
        return
    told = len(outputs.weight_versions)
    accept(outputs, req=req)
    if len(outputs.weight_versions) > told and outputs.weight_versions[-1] is None:
        outputs.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=outputs.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )
