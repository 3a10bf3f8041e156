"""What the policy wrote, one file per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rl_tpu.tracking.json_files import to_json, write_atomically
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.sink import Sink
from rl_tpu.types import Group


class SampleDump(Sink):
    """``samples/step-000012.jsonl``: one line per sample. A resumed run removes the files of the steps it repeats."""

    name = "sample dump"

    def __init__(self, directory: RunDirectory, start_step: int) -> None:
        self._directory = directory
        directory.samples.mkdir(exist_ok=True)
        first_repeated = directory.step_samples(start_step).name
        for path in directory.samples.glob("step-*.jsonl"):
            if path.name >= first_repeated:
                path.unlink()

    def samples(self, step: int, groups: list[Group]) -> None:
        lines = (to_json(row) + "\n" for row in sample_rows(step, groups))
        write_atomically(self._directory.step_samples(step), lines)


def sample_rows(step: int, groups: list[Group]) -> Iterator[dict[str, Any]]:
    """Every sample as a row: where it comes from, what it says, how it was scored, then ids and log-probabilities."""
    for group in groups:
        for number, sample in enumerate(group.samples):
            yield {
                "step": step,
                "group": group.index,
                "sample": number,
                "id": sample.id,
                "prompt_id": group.prompt.id,
                "messages": list(group.prompt.messages),
                "answer": group.prompt.answer,
                "response": sample.text,
                "reward": sample.reward,
                "reward_parts": sample.reward_parts,
                "reward_error": sample.reward_error,
                "advantage": sample.advantage,
                "finish_reason": sample.finish_reason,
                "spans": [asdict(span) for span in sample.spans],
                "turns": [asdict(turn) for turn in sample.turns],
                "measures": sample.measures,
                "cached_prompt_tokens": sample.cached_prompt_tokens,
                "prompt_ids": sample.prompt_ids,
                "response_ids": sample.response_ids,
                "loss_mask": sample.loss_mask,
                "logprobs": sample.logprobs,
            }
