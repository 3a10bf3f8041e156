"""The files that a prompt source's path means: a file, a glob, a dataset directory, or a list of these."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.rows import READERS, reader
from rl_tpu.errors import UserError
from rl_tpu.registry import nearest, one_line

SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}$")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of files that say their split, as the datasets library reads them."""


def source_files(config: PromptSourceConfig) -> list[tuple[Path, str]]:
    """Every file of a source in a fixed order, each with its path below their common folder (it begins prompts' ids).

    Raises:
        UserError: something does not exist, holds no data, or holds several splits and none is chosen.
    """
    paths = [config.path] if isinstance(config.path, str) else config.path or []
    files = [file for path in paths for file in _files(path, config.split)]
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    return [(file, file.absolute().relative_to(root).as_posix()) for file in files]


def files_exist(config: PromptSourceConfig) -> bool:
    """Whether everything that a source's path names is there (not whether it is of any use)."""
    paths = [config.path] if isinstance(config.path, str) else config.path or []
    return all(Path(path).expanduser().exists() or _matching(path) for path in paths)


def _matching(path: str) -> list[Path]:
    pattern = str(Path(path).expanduser())
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]


def _files(path: str, split: str | None) -> list[Path]:
    given = Path(path).expanduser()
    if given.is_dir():
        return _directory(given, split)
    found = [given] if given.exists() else _matching(path)
    if not found:
        raise UserError(f"there is no prompt file {given}")
    for file in found:
        reader(file)
    return found


def _directory(directory: Path, split: str | None) -> list[Path]:
    """The data files of one split of a directory that `save_to_disk` wrote or that came from a hub."""
    if (directory / "dataset_dict.json").exists():
        chosen = _choose(directory, _listed(directory / "dataset_dict.json", "splits", str), split)
        return _saved(directory / chosen)
    if (directory / "state.json").exists():
        return _saved(directory)
    splits: dict[str, list[Path]] = {}
    for file in _data_files(directory):
        splits.setdefault(_split_of(file), []).append(file)
    if not splits:
        deeper = sorted({file.parent for kind in READERS for file in directory.rglob(f"*{kind}")})
        hint = f"; there is some in {', '.join(str(folder.relative_to(directory)) for folder in deeper[:8])}"
        raise UserError(
            f"{directory} has no {', '.join(READERS)} files in it nor in its folder data{hint if deeper else ''}"
        )
    return splits[_choose(directory, splits, split)]


def _data_files(directory: Path) -> Iterator[Path]:
    for folder in (directory, directory / "data"):
        yield from sorted(file for file in folder.glob("*") if file.name.endswith(tuple(READERS)) and file.is_file())


def _split_of(file: Path) -> str:
    """The split a hub file's name says, `train` where it says none."""
    stem = file.name.split(".", 1)[0]
    if shard := SHARD.match(stem):
        return shard["split"]
    words = re.split(r"[^a-z]+", stem.lower())
    return next((split for split, known in SPLIT_WORDS.items() if set(known) & set(words)), "train")


def _choose(directory: Path, splits: list[str] | dict[str, list[Path]], wanted: str | None) -> str:
    names = sorted(splits)
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None:
        raise UserError(f"{directory} has the splits {', '.join(names)}; choose one with split")
    if wanted not in names:
        raise UserError(f"{directory} has no split {wanted!r}{nearest(wanted, names)} (it has {', '.join(names)})")
    return wanted


def _saved(directory: Path) -> list[Path]:
    """The Arrow files of a dataset that `save_to_disk` wrote, in the order of its rows."""
    names = _listed(directory / "state.json", "_data_files", lambda entry: entry["filename"])
    files = [directory / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}, named in its state.json; copy the directory again")
    return files


def _listed(path: Path, key: str, name: Callable[[Any], str]) -> list[str]:
    """The ``name`` of every entry under ``key`` of a JSON file; there is at least one."""
    try:
        names = [name(entry) for entry in json.loads(path.read_text())[key]]
        if not names:
            raise ValueError(f"{key} is empty")
        return names
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what save_to_disk writes: {type(error).__name__} {one_line(error)}") from None
