"""Learning from samples that are there already: the dump of a run, step by step, in place of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.experience import ADDED_PARTS
from rl_tpu.tracking import RunDirectory
from rl_tpu.types import Group, Prompt, Sample, Turn, VersionSpan


class Replay:
    """Hands out the groups of a run directory's ``samples/step-*.jsonl``, as `Collector` does those of engines.

    Rewards are taken as they are, but for what `config.algorithm` had added to them: that is computed anew.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises UserError for a directory without samples, steps that are missing, and steps of another size."""
        self._per_step = config.rollout.prompts_per_step
        self._files = find_steps(config)
        self._next = 0
        self.metrics: dict[str, float] = {}

    def advance(self, version: int) -> None:
        """Nothing is to be drawn."""

    async def batch(self, version: int) -> list[Group]:
        """The groups of the next step; none if there is no further one. Raises RunError for a row that is no sample."""
        if self._next >= len(self._files):
            return []
        self._next += 1
        return read_groups(self._files[self._next - 1])

    def state(self) -> dict[str, Any]:
        """As the collector's, with nothing ready and nothing in flight."""
        groups = self._next * self._per_step
        return {"stream": {}, "consumed": groups, "next_index": groups, "ready": [], "in_flight": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the steps of `state()`."""
        self._next = state["consumed"] // self._per_step

    async def close(self) -> None:
        """Nothing is in flight."""


def find_steps(config: RunConfig) -> list[Path]:
    """The files of all steps, in order. Raises UserError as `Replay` does."""
    directory = RunDirectory(Path(config.replay).expanduser().resolve()).samples
    files = sorted(directory.glob("step-*.jsonl"))
    if not files:
        raise UserError(f"replay={config.replay!r}: there is no {directory}/step-000000.jsonl; name a run directory")
    for number, file in enumerate(files):
        if file.name != RunDirectory(directory.parent).step_samples(number).name:
            raise UserError(f"replay={config.replay!r}: step {number} is missing, the next one there is {file.name}")
        with file.open("rb") as lines:
            found = sum(1 for _ in lines)
        if found != config.samples_per_step:
            raise UserError(
                f"replay: {file} has {found} samples, rollout.prompts_per_step {config.rollout.prompts_per_step} x"
                f" samples_per_prompt {config.rollout.samples_per_prompt} are {config.samples_per_step}: replay with the"
                " numbers of the run that wrote it"
            )
    return files


def read_groups(file: Path) -> list[Group]:
    """The groups of one step, in their order. Raises RunError that names the line."""
    groups: dict[int, Group] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                group = groups.setdefault(row["group"], Group(row["group"], _prompt(row), []))
                group.samples.append(_sample(row))
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"replay: {file}, line {number} is no sample ({type(error).__name__}: {error})"
                ) from None
    return list(groups.values())


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(row["prompt_id"], tuple(row["prompt_ids"]), row["answer"], tuple(row["messages"]))


def _sample(row: dict[str, Any]) -> Sample:
    parts = {name: value for name, value in row["reward_parts"].items() if name not in ADDED_PARTS}
    return Sample(
        prompt_ids=row["prompt_ids"],
        response_ids=row["response_ids"],
        loss_mask=row["loss_mask"],
        logprobs=row["logprobs"],
        spans=[VersionSpan(**span) for span in row["spans"]],
        finish_reason=row["finish_reason"],
        text=row["response"],
        reward=sum(parts.values()),
        reward_parts=parts,
        reward_error=row["reward_error"],
        turns=[Turn(**turn) for turn in row.get("turns", ())],
        measures=row.get("measures", {}),
        id=row.get("id", ""),
    )
