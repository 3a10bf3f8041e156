"""Stand-ins for two packages SGLang imports at start and never uses on a CPU.

``triton`` is not part of a CPU torch, and the registry's torchvision wheel is built for CUDA: beside a CPU torch its
binary does not load and its Python side then fails on the operators it expected. Both stand-ins are import hooks of the
server's processes alone; with a working triton or torchvision they never act.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

_libraries = []  # torch drops an operator when its library object goes


class _TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Defines the operators torchvision's Python side registers shapes for, if its binary did not."""

    def find_spec(self, name, path=None, target=None):
        # torchvision has tried its binary by the time it imports this module.
        if name == "torchvision._meta_registrations" and not sys.modules["torchvision.extension"]._has_ops():
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _libraries.append(library)


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


class _TritonStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last resort of ``import triton`` and all below it: kernels can be defined, none can run."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
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


def install_torchvision() -> None:
    """Put torchvision's stand-in in place for this process: transformers imports torchvision beside its models, too."""
    sys.meta_path.insert(0, _TorchvisionOperators())


def install() -> None:
    """Put the stand-ins in place for this process. Cheap: nothing is imported until SGLang asks."""
    install_torchvision()
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_TritonStub())
