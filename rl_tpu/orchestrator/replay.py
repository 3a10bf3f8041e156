"""Learning from samples that are there already: the dump of a run, step by step, in place of engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.progress import track

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.experience import ADDED_PARTS
from rl_tpu.tracking import RunDirectory
from rl_tpu.types import Group, Prompt, Sample, Turn, VersionSpan

MANY = 20
"""Steps from which on reading them shows a bar."""


class Replay:
    """Hands out the groups of a run directory's ``samples/step-*.jsonl``, as `Collector` does those of engines.

    Rewards are taken as they are, but for what `config.algorithm` had added to them: that is computed anew.
    """

    def __init__(self, config: RunConfig, files: list[Path], vocabulary: int) -> None:
        """``files`` as `check_steps` returns them, token ids below ``vocabulary``."""
        self._per_step = config.rollout.prompts_per_step
        self._files = files
        self._vocabulary = vocabulary
        self._next = 0
        self.metrics: dict[str, float] = {}

    def advance(self, version: int) -> None:
        """Nothing is to be drawn."""

    async def batch(self, version: int) -> list[Group]:
        """The groups of the next step; none if there is no further one. Raises UserError for another model's."""
        if self._next >= len(self._files):
            return []
        file = self._files[self._next]
        self._next += 1
        groups = read_groups(file)
        samples = [sample for group in groups for sample in group.samples]
        largest = max(id for sample in samples for id in (*sample.prompt_ids, *sample.response_ids))
        if largest >= self._vocabulary:
            raise UserError(
                f"replay: {file} has the token id {largest}, the model's vocabulary has {self._vocabulary} tokens: replay"
                " with the model of the run that wrote it"
            )
        return groups

    def state(self) -> dict[str, Any]:
        """As the collector's, with nothing ready and nothing in flight."""
        groups = self._next * self._per_step
        return {"stream": {}, "consumed": groups, "next_index": groups, "ready": [], "in_flight": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the steps of `state()`."""
        self._next = state["consumed"] // self._per_step

    async def close(self) -> None:
        """Nothing is in flight."""


def check_steps(config: RunConfig, run_dir: Path) -> list[Path]:
    """The files of all steps to replay into ``run_dir``, in order, each read once.

    Raises UserError for a directory without samples, the run's own, steps that are missing, a row that is no sample, groups
    of another size, and samples that are too long for the trainer's rows.
    """
    directory = RunDirectory(Path(config.replay).expanduser().resolve())
    if directory.path == run_dir.resolve():
        raise UserError(
            f"replay={config.replay!r} is the run's own directory, whose samples it would replace: set run_dir"
        )
    files = sorted(directory.samples.glob("step-*.jsonl"))
    if not files:
        raise UserError(f"replay={config.replay!r}: there is no {directory.step_samples(0)}; name a run directory")
    for number, file in enumerate(track(files, "reading the samples", transient=True, disable=len(files) < MANY)):
        if file.name != directory.step_samples(number).name:
            raise UserError(f"replay={config.replay!r}: step {number} is missing, the next one there is {file.name}")
        _check_groups(file, read_groups(file), config)
    return files


def read_groups(file: Path) -> list[Group]:
    """The groups of one step, in their order. Raises UserError that names the line."""
    groups: dict[int, Group] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                group = groups.setdefault(row["group"], Group(row["group"], _prompt(row), []))
                group.samples.append(_sample(row))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"replay: {file}, line {number} is no sample ({type(error).__name__}: {error})"
                ) from None
    return list(groups.values())


def _check_groups(file: Path, groups: list[Group], config: RunConfig) -> None:
    rollout, longest = config.rollout, max(config.trainer.row_tokens)
    sizes = sorted({len(group.samples) for group in groups})
    if len(groups) != rollout.prompts_per_step or sizes != [rollout.samples_per_prompt]:
        raise UserError(
            f"replay: {file} has {len(groups)} groups of {' or '.join(map(str, sizes))} samples,"
            f" rollout.prompts_per_step is {rollout.prompts_per_step} and samples_per_prompt {rollout.samples_per_prompt}:"
            " replay with the numbers of the run that wrote it"
        )
    for sample in (sample for group in groups for sample in group.samples):
        if sample.total_tokens > longest:
            raise UserError(
                f"replay: {file} has a sample of {sample.total_tokens} tokens, the longest row of trainer.row_tokens is"
                f" {longest}"
            )


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(row["prompt_id"], tuple(row["prompt_ids"]), row["answer"], tuple(row["messages"]))


def _sample(row: dict[str, Any]) -> Sample:
    parts = {name: _number(value) for name, value in row["reward_parts"].items() if name not in ADDED_PARTS}
    sample = Sample(
        prompt_ids=row["prompt_ids"],
        response_ids=row["response_ids"],
        loss_mask=row["loss_mask"],
        logprobs=[_number(value) for value in row["logprobs"]],
        spans=[VersionSpan(**span) for span in row["spans"]],
        finish_reason=row["finish_reason"],
        text=row["response"],
        reward=sum(parts.values()),
        reward_parts=parts,
        reward_error=row["reward_error"],
        turns=[Turn(**turn) for turn in row.get("turns", ())],
        measures=row.get("measures", {}),
        cached_prompt_tokens=row.get("cached_prompt_tokens", 0),
        id=row.get("id", ""),
    )
    if not len(sample.response_ids) == len(sample.loss_mask) == len(sample.logprobs):
        raise ValueError("response_ids, loss_mask and logprobs differ in length")
    return sample


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no other word for it
