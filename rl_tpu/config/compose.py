"""From the command line and `configs/` to a validated `RunConfig`, or one line that says what is wrong."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from rl_tpu.config.rules import broken_rules
from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError

ROOT_CONFIG = "train"


def resource(relative: str) -> Path:
    """A file or folder that ships with the package (configs/..., examples/...), in a wheel or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside_wheel = package / relative
    return inside_wheel if inside_wheel.exists() else package.parent / relative


def find_file(path: str) -> Path:
    """`path` as given (relative to the working directory), else beside configs/."""
    given = Path(path).expanduser()
    return given if given.exists() else resource(path)


def register_with_hydra() -> None:
    """Teach Hydra every key of the schema with its default, and the resolvers that `configs/` uses."""
    ConfigStore.instance().store(name="schema", node=_defaults(RunConfig))
    OmegaConf.register_new_resolver("rl_tpu.cache", cache_directory, replace=True)
    OmegaConf.register_new_resolver("rl_tpu.digest", file_digest, replace=True)
    OmegaConf.register_new_resolver("rl_tpu.share", lambda share, of: int(share * of), replace=True)
    OmegaConf.register_new_resolver("rl_tpu.first", lambda *values: next(v for v in values if v), replace=True)


def cache_directory() -> str:
    """Where made models are kept: RL_TPU_CACHE, else ~/.cache/rl_tpu."""
    return os.environ.get("RL_TPU_CACHE") or str(Path.home() / ".cache" / "rl_tpu")


def file_digest(*paths: str) -> str:
    """Ten hexadecimal digits that change when the Python files beside the paths do: names what such scripts once made."""
    digest = xxhash.xxh3_64()
    for path in paths:
        for source in sorted(find_file(path).parent.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:10]


def validate(composed: DictConfig) -> RunConfig:
    """The composed configuration as typed, checked values.

    Raises:
        UserError: a key or value is wrong, or settings contradict each other; all findings in one line.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {_first_line(error)}") from None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("configuration: " + "; ".join(_explain(details) for details in error.errors())) from None
    if broken := broken_rules(config):
        raise UserError("configuration: " + "; ".join(broken))
    return config


def check_command_line(arguments: Sequence[str]) -> None:
    """Compose and validate what the command line asks for, every value of a sweep included, before Hydra runs it.

    Raises:
        UserError: unknown key (the nearest one is named), unknown config file, value out of range.
    """
    if "--hydra-help" in arguments or "--version" in arguments:
        return
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    directories = _option(arguments, "--config-dir", "-cd")
    values = directories + _option(arguments, "--cfg", "-c", "--info", "-i", "--package", "-p")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"command line: {_first_line(error)}") from None
    for argument in arguments:
        if argument.startswith("=") or ("=" not in argument and argument[:1] != "-" and argument not in values):
            raise UserError(f"command line: {argument!r} is neither KEY=VALUE nor an option")
    for override in parsed:
        _check_key(override)
    for variant in _variants(parsed):
        validate(compose_config(variant, directories))


def compose_config(overrides: Sequence[str], config_directories: Sequence[str] = ()) -> DictConfig:
    """Compose `configs/train.yaml` with overrides, as `python -m rl_tpu.train` does."""
    register_with_hydra()
    search = [f"hydra.searchpath=[{','.join('file://' + os.path.abspath(d) for d in config_directories)}]"]
    try:
        with initialize_config_dir(str(resource("configs").resolve()), version_base="1.3"):
            return compose(ROOT_CONFIG, overrides=[*overrides, *(search if config_directories else [])])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"configuration: {_first_line(error)}") from None


def load_config(overrides: Sequence[str] = (), config_directories: Sequence[str] = ()) -> RunConfig:
    """`compose_config` and `validate` in one call, for tests, notebooks and scripts."""
    return validate(compose_config(overrides, config_directories))


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """Every key of a section: its default, `???` (must be given), or a nested dictionary."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            values[name] = _defaults(field.annotation)
        elif field.default is not PydanticUndefined:
            values[name] = field.default
        elif field.default_factory is not None:
            values[name] = field.default_factory()  # type: ignore[call-arg]
        else:
            values[name] = "???"
    return values


def _check_key(override: Override) -> None:
    """An override's key must lead to a field of the schema (or into one of its free dictionaries)."""
    key = override.key_or_group
    if key.startswith("hydra") or resource(f"configs/{key}").is_dir() or "/" in key:
        return
    section: Any = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if _is_section(section) and part not in section.model_fields:
            parent = ".".join(parts[:depth])
            raise UserError(f"unknown configuration key {key!r}{_nearest(part, section, parent)}")
        section = _within(section, part)


def _nearest(name: str, section: type[BaseModel], parent: str) -> str:
    prefix = f"{parent}." if parent else ""
    close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; {parent or 'the top level'} has: {', '.join(section.model_fields)}"


def _explain(details: ErrorDetails) -> str:
    """One pydantic finding in the words of the configuration."""
    path = ".".join(str(part) for part in details["loc"])
    section = _section_at(details["loc"][:-1])
    name = str(details["loc"][-1]) if details["loc"] else ""
    if details["type"] == "extra_forbidden" and section is not None:
        return f"unknown key {path!r}{_nearest(name, section, '.'.join(map(str, details['loc'][:-1])))}"
    if details["type"] == "missing" or details.get("input") == "???":
        return f"{path} is required"
    field = section.model_fields.get(name) if section is not None else None
    meaning = f" ({' '.join(field.description.split())})" if field is not None and field.description else ""
    return f"{path}={details.get('input')!r}: {details['msg']}{meaning}"


def _section_at(location: tuple[str | int, ...]) -> type[BaseModel] | None:
    section: Any = RunConfig
    for part in location:
        section = _within(section, str(part))
    return section if _is_section(section) else None


def _within(section: Any, name: str) -> Any:
    """The type of what is called `name` in a section, or in a dictionary or list; None where anything may be."""
    if _is_section(section):
        field = section.model_fields.get(name)
        return field.annotation if field is not None else None
    arguments = getattr(section, "__args__", ())
    return arguments[-1] if arguments else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _variants(parsed: list[Override]) -> Iterator[list[str]]:
    """Plain override lists that together use every value of every sweep once."""
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line]
        for o in parsed
    ]
    for turn in range(max((len(values) for values in choices), default=1)):
        yield [values[min(turn, len(values) - 1)] for values in choices]


def _option(arguments: Sequence[str], *names: str) -> list[str]:
    """Values of a `--name VALUE` or `--name=VALUE` option."""
    found = []
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in names:
            found.append(value or (arguments[position + 1] if position + 1 < len(arguments) else ""))
    return found


def _first_line(error: BaseException) -> str:
    """A Hydra or OmegaConf message on one line, without its list of search paths."""
    text = " ".join(str(error).split("Config search path")[0].split()) or type(error).__name__
    if text.startswith("You must specify"):
        names = sorted(file.stem for file in resource("configs/experiment").glob("*.yaml"))
        return f"{text}; or choose an experiment: +experiment={'|'.join(names)}"
    return text
