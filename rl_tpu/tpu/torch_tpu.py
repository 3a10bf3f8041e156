"""What is used of torch_tpu's and JAX's private interfaces, all of it here, for the versions that are pinned.

torch_tpu's own operator implementations run on placeholders, without hardware, and come out as StableHLO; JAX takes
StableHLO as one operation of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.fx import GraphModule

from rl_tpu.errors import UserError
from rl_tpu.tpu.offline import silent_libraries

PINNED = {"torch_tpu": "0.2.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.52"}
"""Versions whose private interfaces are known."""


def check_versions() -> None:
    """UserError that names what is missing or of another version than PINNED."""
    for package, pinned in PINNED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        if found != pinned:
            raise UserError(
                f"{package} {pinned} is needed for lowering TPU programs (it has no public interface for that), and is"
                f" {found}: pip install {package}=={pinned}"
            )


@cache
def _load() -> None:
    """torch's `tpu` device, without hardware: real tensors cannot be made on it, placeholders can."""
    check_versions()
    with warnings.catch_warnings(), silent_libraries():
        warnings.simplefilter("ignore")  # about its host allocator
        from torch_tpu import _loader

        _loader._init_device("tpu")


def to_stablehlo(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> str:
    """StableHLO text of `graph`, whose function `main` takes tensors like `inputs` and returns what the graph does.

    Raises RuntimeError, torch_tpu's own, for an operation that it does not have.
    """
    _load()
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.export.export import EagerLikeFxInterpreter

    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:  # constants name the device that they were captured on
            node.kwargs = {**node.kwargs, "device": torch.device("tpu")}
    graph.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is experimental
        mode = execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH)
    with mode, torch.no_grad(), silent_libraries():  # at every operation it says that there is no device
        arguments = [tpu_torch_compile.placeholder(list(each.shape), each.dtype, False) for each in inputs]
        results = EagerLikeFxInterpreter(graph).run(*(argument.clone() for argument in arguments))
        # Every result needs a node of its own, also one that is an argument or another result.
        module = tpu_torch_compile.build_mlir([result.clone() for result in results], arguments)
        # JAX's own dialect has no such attribute yet, and this is its default.
        return tpu_torch_compile.serialize_mlir_text(module).replace(", is_stable = false", "")


@cache
def stablehlo_primitive():
    """A JAX operation that is a StableHLO module: arguments and results are those of its function `main`."""
    import jax
    from jax._src.interpreters import mlir
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func

    primitive = Primitive("stablehlo_module")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*arguments, text, name, results):
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]

    def lower(context, *arguments, text, name, results):
        module = ir.Module.parse(text)
        main = mlir.merge_mlir_modules(
            context.module_context.module, name, module, dst_symtab=context.module_context.symbol_table
        )
        types = [mlir.aval_to_ir_type(context.module_context, aval) for aval in context.avals_out]
        return func.CallOp(types, ir.FlatSymbolRefAttr.get(main), arguments).results

    mlir.register_lowering(primitive, lower)
    return primitive
