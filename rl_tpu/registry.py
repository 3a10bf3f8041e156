"""Finding a reward, an environment or any other part by its name or its import path."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from rl_tpu.errors import UserError


def lookup(what: str, name: str, known: Mapping[str, str]) -> Any:
    """The object called ``name``: a key of ``known``, or an import path ``package.module:attribute``.

    ``known`` maps names to import paths, so a part is imported only when somebody asks for it. ``what`` names the kind
    of part in messages. Modules in the working directory are found. Raises UserError for an unknown name (listing the
    known ones), a module that does not exist or fails to import, and a module without the attribute.
    """
    path = known.get(name, name)
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        hint = f"{unknown(what, name, known)}; your own is given by its import path, package.module:attribute"
        raise UserError(hint)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise UserError(
                f"{what} {name!r}: there is no module {missing!r} in the working directory or on PYTHONPATH"
            ) from None
        raise UserError(f"{what} {name!r}: importing {module_name} failed: {describe(error)}") from error
    except Exception as error:
        raise UserError(f"{what} {name!r}: importing {module_name} failed: {describe(error)}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in vars(module) if not key.startswith("_")]
            raise UserError(f"{what} {name!r}: {module.__file__} has no {attribute!r}{nearest(attribute, public)}")
        found = getattr(found, part)
    return found


def check_options(what: str, name: str, call: Callable[..., Any], leading: Iterable[str], options: Mapping) -> None:
    """Raise UserError unless ``call(*leading, **options)`` fits the signature of ``call``.

    ``leading`` names the arguments we give ourselves; the rest of the signature is what the configuration may set. Values
    are checked against annotations where there are some. A constructor that takes ``**options`` has those of the class that
    it extends.
    """
    leading = list(leading)
    try:
        signature = _signature(call)
    except (TypeError, ValueError):
        raise UserError(f"{what} {name!r} is not callable") from None
    try:
        signature.bind(*leading, **options)
        check_types(what, name, call, options)
    except TypeError as error:
        wanted = [key for key in list(signature.parameters)[len(leading) :] if not key.startswith("_")]
        unknown_keys = [key for key in options if key not in wanted]
        close = nearest(unknown_keys[0], wanted) if unknown_keys else ""
        has = f"; its options: {', '.join(wanted) or 'none'}"
        raise UserError(
            f"{what} {name!r} is called with ({', '.join(leading)}) and options: {error}{close}{has}"
        ) from None


def _signature(call: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(call)
    if not isinstance(call, type):
        return signature
    parameters = dict(signature.parameters)
    for constructor in _constructors(call):
        rest = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        inherited = dict(list(inspect.signature(constructor).parameters.items())[1:])
        if rest and inherited.keys() - parameters.keys():
            del parameters[rest[0]]
            parameters = inherited | parameters
    return signature.replace(parameters=sorted(parameters.values(), key=lambda parameter: parameter.kind))


def _constructors(made: type) -> list[Callable[..., Any]]:
    """Its own, then those of the classes that it extends."""
    return [vars(each)["__init__"] for each in made.__mro__ if each is not object and "__init__" in vars(each)]


def check_types(what: str, name: str, call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise UserError unless the values of ``options`` fit the annotations of ``call``, where there are some."""
    while isinstance(call, functools.partial):
        call = call.func
    try:
        annotations = {}
        for function in _constructors(call) if isinstance(call, type) else [call]:
            annotations = get_type_hints(function, include_extras=True) | annotations
    except Exception:  # names imported for type checkers alone
        return
    for key in options.keys() & annotations.keys():
        try:
            TypeAdapter(annotations[key]).validate_python(options[key])
        except PydanticSchemaGenerationError:
            continue
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise UserError(f"{what} {name!r}, option {key}: {message}; it is {options[key]!r}") from None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown reward 'mth', did you mean 'math'? (known: math, reasoning_gym)``."""
    known = sorted(known)
    return f"unknown {what} {name!r}{nearest(name, known)} (known: {', '.join(known)})"


def nearest(name: str, known: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def describe(error: BaseException, where: str | None = None) -> str:
    """An exception in one line: its type, message and place. ``where`` prefers the innermost frame of that file."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == where] or frames
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"


def one_line(message: object) -> str:
    """A message with its line breaks folded."""
    return " ".join(str(message).split())
