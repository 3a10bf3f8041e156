"""Problems from JSONL and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.problem import Message, Problem
from rl_tpu.errors import UserError
from rl_tpu.registry import nearest, one_line

Row = tuple[int, dict[str, Any]]


def file_problems(config: PromptSourceConfig) -> Iterator[Problem]:
    """The rows of a file, one problem each. Raises UserError, naming file and line, at the first bad one."""
    path = Path(config.path).expanduser()
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.is_dir():
        raise UserError(f"{path} is a directory; give one .jsonl or .parquet file")
    if not path.exists():
        raise UserError(f"there is no prompt file {path}")
    if path.suffix not in readers:
        raise UserError(f"{path}: prompts are read from .jsonl or .parquet files, not {path.suffix or 'this'!r}")
    try:
        for number, row in readers[path.suffix](path):
            where = f"{path}:{number}"
            answer = _field(row, config.answer_field, where)
            if answer is None:
                raise UserError(f"{where}: the answer (field {config.answer_field!r}) is null")
            others = {key: row[key] for key in row if key not in (config.prompt_field, config.answer_field)}
            content = _content(_field(row, config.prompt_field, where), config.prompt_field, where)
            yield Problem(f"{path.name}:{number}", where, content, answer, others)
    except OSError as error:
        raise UserError(f"cannot read the prompt file {path}: {one_line(error)}") from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line)"
                ) from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not JSON: {one_line(error)}") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: a row must be a JSON object, this is {type(row).__name__}")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {one_line(error)}") from error


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    """``row[name]``, or the nested field a dotted name means."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = list(value) if isinstance(value, dict) else []
            inside = f"; fields there: {', '.join(there)}" if there else f"; {type(value).__name__} has no fields"
            raise UserError(f"{where}: no field {name!r}{nearest(part, there)}{inside}")
        value = value[part]
    return value


def _content(value: Any, name: str, where: str) -> str | list[Message]:
    """A prompt as text or as chat messages reduced to role and content."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise UserError(f"{where}: every message in {name!r} must be an object with strings role and content")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    kind = "empty" if value in ("", []) or isinstance(value, str) else type(value).__name__
    raise UserError(f"{where}: field {name!r} must be text or a list of chat messages, it is {kind}")
