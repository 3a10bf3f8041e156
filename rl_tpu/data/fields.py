"""From the row of a file to a problem: which fields hold prompt, answer, choices and pass rate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

from rl_tpu.boxed import last_boxed
from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.files import source_files
from rl_tpu.data.problem import Message, Problem
from rl_tpu.data.rows import read_rows
from rl_tpu.data.sampling import row_sampling
from rl_tpu.errors import UserError
from rl_tpu.registry import nearest


def file_problems(config: PromptSourceConfig) -> Iterator[Problem]:
    """The rows of all files of a source, one problem each. Raises UserError, naming file and line, at the first bad one."""
    for path, name in source_files(config):
        for number, row in read_rows(path):
            yield row_problem(row, config, f"{name}:{number}", f"{path}:{number}")


def row_problem(row: dict[str, Any], config: PromptSourceConfig, identity: str, where: str) -> Problem:
    """One row as a problem; all its other fields are metadata. Raises UserError for a missing or unfit field."""
    content = _content(_field(row, config.prompt_field, where), config.prompt_field, where)
    answer = _field(row, config.answer_field, where)
    if answer is None:
        raise UserError(f"{where}: the answer (field {config.answer_field!r}) is null")
    choices = ""
    if config.choices_field is not None:
        options = _options(_field(row, config.choices_field, where), config.choices_field, where)
        choices = "\n".join(f"{letter}. {option}" for letter, option in options.items())
        answer = _letter(answer, options, config.answer_field, where)
    if config.answer_pattern is not None:
        answer = _part(answer, config.answer_pattern, config.answer_field, where)
    pass_rate = None
    if config.pass_rate_field is not None:
        pass_rate = _share(_field(row, config.pass_rate_field, where), config.pass_rate_field, where)
    sampling = {}
    if config.sampling_field is not None:
        value = _field(row, config.sampling_field, where)
        sampling = row_sampling(value, config.sampling_field, where)
    metadata = {key: row[key] for key in row if key not in (config.prompt_field, config.answer_field)}
    return Problem(identity, where, content, answer, metadata, choices, pass_rate, sampling)


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


def _options(value: Any, name: str, where: str) -> dict[str, str]:
    """Choices by letter."""
    texts = isinstance(value, list) and all(isinstance(option, str) for option in value)
    if not texts or not 2 <= len(value) <= len(ascii_uppercase):
        raise UserError(f"{where}: the choices (field {name!r}) must be 2 to 26 texts, they are {value!r:.200}")
    return dict(zip(ascii_uppercase, value, strict=False))


def _letter(answer: Any, options: dict[str, str], name: str, where: str) -> str:
    """The letter of the right choice, given as a position from 0, a letter or the choice's text."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return ascii_uppercase[answer]
    if isinstance(answer, str) and answer in options:
        return answer
    matching = [letter for letter, option in options.items() if option == answer]
    if len(matching) == 1:
        return matching[0]
    raise UserError(
        f"{where}: the answer (field {name!r}) must be a position from 0 to {len(options) - 1}, a letter from A to "
        f"{list(options)[-1]} or the text of one choice, it is {answer!r:.200}"
    )


def _part(answer: Any, pattern: str, name: str, where: str) -> str:
    """What ``answer_pattern`` finds in the answer field."""
    if not isinstance(answer, str):
        raise UserError(f"{where}: answer_pattern needs text in field {name!r}, it is {type(answer).__name__}")
    if pattern == "boxed":
        boxed = last_boxed(answer)
        found = boxed[1] if boxed else None
    else:
        matches = list(re.finditer(pattern, answer))
        found = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    if not found or not found.strip():
        raise UserError(f"{where}: answer_pattern {pattern!r} finds no answer in field {name!r}: {answer[-200:]!r}")
    return found.strip()


def _share(value: Any, name: str, where: str) -> float:
    """A pass rate from a share or from a list of scores."""
    scores = value if isinstance(value, list) else [value]
    if not scores or not all(isinstance(score, (int, float)) and 0 <= score <= 1 for score in scores):
        raise UserError(
            f"{where}: the pass rate (field {name!r}) must be a number from 0 to 1 or a list of them, it is {value!r:.200}"
        )
    return sum(scores) / len(scores)
