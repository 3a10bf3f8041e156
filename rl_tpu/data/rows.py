"""Rows of JSONL, Parquet and Arrow files, one at a time: a large file is never held whole."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_tpu.errors import UserError
from rl_tpu.registry import one_line

Row = tuple[int, dict[str, Any]]
"""Line or row number from 1, and its fields."""

BATCH = 1024
"""Rows that are Python objects at the same time."""

NO_VALUE = (ValueError, OverflowError)
"""What pyarrow raises for text that is no UTF-8 and times that Python does not know."""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises UserError, naming file and line, at the first that cannot be read."""
    try:
        yield from reader(path)(path)
    except OSError as error:
        raise UserError(f"cannot read the prompt file {path}: {one_line(error)}") from error


def reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    """What reads a file of this name. Raises UserError if nothing does."""
    for suffix, read in READERS.items():
        if path.name.endswith(suffix):
            return read
    raise UserError(f"{path}: prompts are read from {', '.join(READERS)} files, not {path.suffix or 'this'!r}")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _json_row(line, f"{path}:{number}", first=number == 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path}: broken gzip file after line {number}: {one_line(error)}") from None


def _json_row(line: bytes, where: str, *, first: bool) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON (one object per line): {one_line(error)}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object on one line, this is {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, *NO_VALUE) as error:
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {one_line(error)}") from error


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            for batch in stream:
                for start in range(0, batch.num_rows, BATCH):
                    for row in batch.slice(start, BATCH).to_pylist():
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, *NO_VALUE) as error:
        raise UserError(f"{path}: not a readable Arrow file (after row {number}): {one_line(error)}") from error


READERS = {".jsonl": _jsonl_rows, ".jsonl.gz": _jsonl_rows, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
"""What reads a file, by the end of its name."""
