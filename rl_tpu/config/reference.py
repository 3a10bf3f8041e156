"""Prints docs/configuration.md from the schema: `python -m rl_tpu.config.reference > docs/configuration.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rl_tpu.config.schema import EvalSetConfig, MixedSourceConfig, PromptSourceConfig, RunConfig
from rl_tpu.config.schema.reward import RewardChoice, RewardPart

HEADER = """# Configuration reference

Generated from `rl_tpu/config/schema/` by `make docs`. Every key can be set on the command line
(`python -m rl_tpu.train +experiment=quickstart rollout.temperature=0.8`) or in a file of a group under `configs/`.
Keys inside free dictionaries (`options`, `sets`, `server_options`) are added with a plus:
`+reward.options.answer_format=boxed`.
"""


def reference() -> str:
    """The whole reference as Markdown."""
    sections = [("", RunConfig), *_nested(RunConfig, "")]
    sections += [
        ("data.train, data.train.sources.NAME, evaluation.sets.NAME.source", PromptSourceConfig),
        ("data.train.sources.NAME", MixedSourceConfig),
        ("evaluation.sets.NAME", EvalSetConfig),
        ("reward.parts", RewardPart),
        ("reward.by_source.NAME", RewardChoice),
    ]
    return "\n".join([HEADER, *(_table(path, section) for path, section in sections)])


def _nested(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield prefix + name, kind
            yield from _nested(kind, f"{prefix}{name}.")


def _table(path: str, section: type[BaseModel]) -> str:
    lines = [f"## {f'`{path}`' if path else 'The run'}", "", _flat(section.__doc__), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    own = inspect.get_annotations(section)
    for name, field in section.model_fields.items():
        if name not in own and issubclass(section, PromptSourceConfig):
            continue  # it stands in that table
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            kind, default = "section", ""
        else:
            kind = _type_name(field.annotation) + _limits(field)
            default = "required" if field.is_required() else f"`{_default(field)}`"
        lines.append(f"| `{name}` | {kind} | {default} | {_flat(field.description)} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> Any:
    return field.default if field.default is not PydanticUndefined else field.default_factory()


def _limits(field: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [(signs[kind], getattr(rule, kind, None)) for rule in field.metadata for kind in signs]
    return "".join(f" {sign} {bound}" for sign, bound in found if bound is not None)


def _type_name(annotation: Any) -> str:
    name = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    name = re.sub(r"typing\.|rl_tpu\.config\.schema\.(\w+\.)?", "", name)
    name = re.sub(r"Annotated\[(\w+), .*?\]\)?\]?", r"\1", name)
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", "`"), name).replace("|", "or")


def _flat(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
