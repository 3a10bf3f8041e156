"""Strict JSON on disk: no NaN or Infinity literals, whole lines, whole files.

A number JSON cannot hold becomes null in the file; `log` rows say which and what under `non_finite`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_tpu.errors import UserError


def to_json(value: Any, indent: int | None = None) -> str:
    """``value`` as strict JSON. Not-a-number and infinities become null, objects JSON does not know their ``str``."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str, indent=indent)
    except ValueError:  # rare, so the walk over every value is paid only then
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write ``text`` so that ``path`` holds either its old content or all of the new one, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append_line(path: Path, value: Any) -> None:
    """Append one row. Lone surrogates, which UTF-8 cannot hold, become the escapes JSON has for them."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(to_json(value) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, none if there is no file. A torn last line (its writer was killed) is left out.

    Raises UserError for any other line that is no JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):  # no newline after it
                break
            raise UserError(f"{path}, line {number}: not a JSON object ({error}); repair or remove that line") from None
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a JSONL file atomically."""
    write_atomically(path, (to_json(row) + "\n" for row in rows))
