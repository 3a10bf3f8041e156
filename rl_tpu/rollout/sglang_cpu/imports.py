"""Stand-ins for two packages SGLang imports at start and never uses on a CPU.

``triton`` is not part of a CPU torch, and the registry's torchvision is built for CUDA: beside a CPU torch its binary does
not load, and whatever imports it fails, transformers included. So neither is installed on a CPU machine, and the server's
processes import stand-ins instead. Where a package is installed, its stand-in never acts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType


class _Stub(ModuleType):
    """A module whose lower-case names are stubs again and whose capitalised names are empty classes."""

    __path__: tuple[str, ...] = ()
    __version__ = "3.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = type(name, (Exception,), {"__init__": lambda self, *_, **__: None, "__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **options):
        """Decorators leave what they decorate as it is: ``@jit`` and ``@jit(...)`` alike."""
        return args[0] if len(args) == 1 and callable(args[0]) and not options else lambda decorated: decorated


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last resort of importing a package that is not there, and all below it: names can be imported, none can run."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self._package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Stub(spec.name)
        if spec.name == "triton":
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
        elif spec.name == "triton.language":
            module.constexpr = type(
                "constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}
            )
        return module

    def exec_module(self, module):
        pass


def install() -> None:
    """Put the stand-ins in place for this process."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the true answer and does without it
    for package in ("triton", "torchvision"):
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(_StubFinder(package))
