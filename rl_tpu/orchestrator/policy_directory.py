"""The Hugging Face directory that a user means by a path."""

from __future__ import annotations

from pathlib import Path

from rl_tpu.errors import UserError
from rl_tpu.tracking import RunDirectory


def find_policy(value: str, argument: str) -> Path:
    """``value`` itself if it is a Hugging Face directory; of a run directory its final policy, or the newest export if it
    has none; of a directory of exports the newest.

    Raises UserError, which names ``argument``, if there is no such directory, and for a training checkpoint.
    """
    if not value:
        raise UserError(f"{argument}= needs a directory: a Hugging Face directory or a run directory")
    path = Path(value).expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"{argument}={value}: there is no directory {path}")
    run = RunDirectory(path)
    for found in (path, run.final, *_newest_first(run.exports), *_newest_first(path)):
        if (found / "config.json").is_file():
            return found
    if (path / "state.json").is_file():
        raise UserError(
            f"{argument}={value} is a training checkpoint: write its policy with"
            f" python -m rl_tpu.export checkpoint={path} out=DIR, and evaluate {argument}=DIR"
        )
    if run.holds_a_run:
        newest = next(_newest_first(run.checkpoints), None)
        hint = f": write one with python -m rl_tpu.export checkpoint={newest} out=DIR" if newest else ""
        raise UserError(f"{argument}={value} is a run that has neither final/ nor exports/{hint}")
    raise UserError(f"{argument}={value} is no Hugging Face directory (it has no config.json) and no run directory")


def _newest_first(directory: Path):
    return iter(sorted(directory.glob("step-*"), reverse=True))
