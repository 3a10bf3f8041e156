"""Checkpoints of the whole run: trainer and driver state in one directory that exists only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_tpu.errors import UserError
from rl_tpu.types import Group, Prompt, Sample, Turn, VersionSpan

FORMAT = 1
PREFIX = "step-"


class Checkpoints:
    """The directory ``checkpoints/`` of a run: ``step-000010/{trainer/, state.json}``.

    A checkpoint is begun under a temporary name, with the driver's state in it, and the trainer may write its part while
    the run goes on; `settle` gives it its name.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory
        self.keep = keep
        self._begun: int | None = None

    async def begin(self, step: int, state: dict[str, Any], save_trainer: Callable[[Path], Awaitable[None]]) -> None:
        """Write step `step` under a temporary name, the trainer's part by `save_trainer`. The one before is settled."""
        for broken_off in self.directory.glob(f".{PREFIX}*.partial"):
            shutil.rmtree(broken_off, ignore_errors=True)
        partial = self._partial(step)
        partial.mkdir(parents=True)
        with open(partial / "state.json", "w") as file:
            json.dump({"format": FORMAT, "step": step, **encode_state(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(partial)
        await save_trainer(partial / "trainer")
        self._begun = step

    async def settle(self, saved: Callable[[], Awaitable[bool]]) -> int | None:
        """Give the checkpoint that was begun its name if the trainer's part is `saved`, every byte of it, and delete what
        it replaces: the oldest ones, and those of later steps, which a run left that resumed from an older one.

        Returns its step; None if nothing was begun or it is still being written. What `saved` raises says that it will
        never be whole.
        """
        if self._begun is None:
            return None
        step, self._begun = self._begun, None
        if not await saved():
            self._begun = step
            return None
        target = self._name(step)
        shutil.rmtree(target, ignore_errors=True)
        self._partial(step).rename(target)
        _sync_directory(self.directory)
        whole = self.whole()
        newest = whole.index(target) + 1
        for replaced in whole[: max(0, newest - self.keep)] + whole[newest:]:
            shutil.rmtree(replaced, ignore_errors=True)
        return step

    def whole(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = [path for path in self.directory.glob(f"{PREFIX}*") if (path / "state.json").is_file()]
        return sorted(found, key=lambda path: path.name)

    def newest(self) -> Path | None:
        return next(reversed(self.whole()), None)

    def _name(self, step: int) -> Path:
        return self.directory / f"{PREFIX}{step:06d}"

    def _partial(self, step: int) -> Path:
        return self.directory / f".{PREFIX}{step:06d}.partial"


def load_state(checkpoint: Path, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The driver's part of a checkpoint; ``prompts`` are the run's, which a checkpoint names by id.

    Raises:
        UserError: not a checkpoint of this program, unreadable, or of other prompts.
    """
    try:
        values = json.loads((checkpoint / "state.json").read_text())
        if values["format"] != FORMAT:
            raise UserError(f"{checkpoint}: checkpoint format {values['format']}, this program reads {FORMAT}")
        return decode_state(values, prompts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint} is not a whole checkpoint ({type(error).__name__}: {error})") from None


def encode_state(state: dict[str, Any]) -> dict[str, Any]:
    """As JSON: a prompt by its id, since its answer and metadata may be anything."""
    collector = dict(state["collector"])
    collector["ready"] = [
        {"index": group.index, "prompt": group.prompt.id, "samples": [asdict(sample) for sample in group.samples]}
        for group in collector["ready"]
    ]
    collector["in_flight"] = [[index, prompt.id] for index, prompt in collector["in_flight"]]
    return {**state, "collector": collector}


def decode_state(values: dict[str, Any], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The inverse of `encode_state`."""
    known = {prompt.id: prompt for prompt in prompts}

    def find(name: str) -> Prompt:
        if name not in known:
            raise UserError(f"resume: the checkpoint holds prompt {name!r}, which is not among this run's prompts")
        return known[name]

    collector = values["collector"]
    collector["ready"] = [
        Group(group["index"], find(group["prompt"]), [_sample(sample) for sample in group["samples"]])
        for group in collector["ready"]
    ]
    collector["in_flight"] = [(index, find(name)) for index, name in collector["in_flight"]]
    return values


def _sample(values: dict[str, Any]) -> Sample:
    spans = [VersionSpan(**span) for span in values["spans"]]
    return Sample(**{**values, "spans": spans, "turns": [Turn(**turn) for turn in values.get("turns", ())]})


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
