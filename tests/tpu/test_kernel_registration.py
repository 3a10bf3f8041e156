"""The kernels as torch_tpu takes them, as far as that goes without a TPU. What it says at the end of that way is asserted:
a torch_tpu that goes further fails here, and rl_tpu/tpu/compose.py may then be needed no more."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from rl_tpu.trainer.kernels import fused_logprobs, grouped_matmul, splash_attention, unshard  # noqa: F401

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is None, reason="needs torch_tpu"),
    pytest.mark.skipif(any(Path("/dev/vfio").glob("[0-9]*")), reason="this host may have a TPU"),
]
NO_DEVICE = "failed to retrieve the PjRt client"

rows, row, tokens = torch.ones(256, 128, dtype=torch.bfloat16), torch.ones(256), torch.ones(256, dtype=torch.int64)
weight, experts, sizes = rows.new_ones(384, 128), rows.new_ones(4, 384, 128), torch.ones(4, dtype=torch.int64)
q, kv, segments = rows.new_ones(1, 256, 4, 128), rows.new_ones(1, 256, 2, 128), torch.ones(1, 256, dtype=torch.int64)
KERNELS = {
    "fused_logprobs": (rows, weight, tokens, 0.7, 128, 128),
    "fused_logprobs_backward": (row, row, rows, weight, tokens, row, row, 0.7, 128, 128),
    "grouped_matmul": (rows, experts, sizes, 128, 128, 128),
    "grouped_matmul_backward": (rows.new_ones(256, 384), rows, experts, sizes, 128, 128, 128),
    "splash_attention": (q, kv, kv, segments, 0.1, 128, 128),
    "splash_attention_backward": (q, q, kv, kv, q, torch.ones(1, 256, 4), segments, 0.1, 128, 128),
}
PLAIN = {name: (row, "norm", torch.bfloat16) for name in ("unshard", "reshard")} | {"accumulate": (row, row)}


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """What `look` says of every operator, from a process of its own: torch_tpu registers a device in its process."""
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "tpu"}
    command = [sys.executable, __file__]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_the_operator_of_a_tpu_up_to_the_program(found, name):
    assert found[name]["jax_schema"] == found[name]["schema"]
    assert found[name]["results"] == described(getattr(torch.ops.rl_tpu, name)(*KERNELS[name]))
    assert NO_DEVICE in found[name]["complaint"]
    assert found[name]["compiled"] == [f"rl_tpu.{name}.default"]
    assert NO_DEVICE in found[name]["compiler"]


@pytest.mark.parametrize("name", PLAIN)
def test_operators_without_a_kernel_are_lowered_as_they_are(found, name):
    assert found[name] == {"results": described(getattr(torch.ops.rl_tpu, name)(*PLAIN[name])), "complaint": None}


def test_every_kernel_is_looked_at():
    from rl_tpu.tpu import kernels

    assert {f"rl_tpu::{name}" for name in KERNELS} == kernels.KERNELS.keys()


def look(name: str, arguments: tuple) -> dict:
    """What torch_tpu makes of a call with placeholders."""
    from torch_tpu._internal.compile import _backend, tpu_torch_compile

    operator, graphs = getattr(torch.ops.rl_tpu, name), []
    arguments = tree_map_only(
        torch.Tensor, lambda each: tpu_torch_compile.placeholder(list(each.shape), each.dtype, False), arguments
    )
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    results = operator(*arguments)
    report = {
        "results": described(results),
        "complaint": complaint(lambda: tpu_torch_compile.build_mlir(tree_leaves(results), tensors)),
    }
    if name in PLAIN:
        return report
    compile_graph = _backend.TpuBackend._compile_graph_module
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda *given: graphs.append(given[-2].graph) or compile_graph(*given)  # noqa: E731
        patch.setattr(_backend.TpuBackend, "_compile_graph_module", spy)
        run = torch.compile(lambda *given: operator(*given), backend="tpu", fullgraph=True, dynamic=False)
        report["compiler"] = complaint(lambda: run(*arguments))
    targets = [node.target for node in graphs[0].nodes]
    return report | {
        "compiled": [str(target) for target in targets if isinstance(target, torch._ops.OpOverload)],
        "schema": schema(operator),
        "jax_schema": schema(getattr(torch.ops.rl_tpu_jax, name)),
    }


def described(results) -> list:
    return [[list(each.shape), str(each.dtype)] for each in tree_leaves(results)]


def schema(operator) -> list:
    """Names and types of what it takes by position, and types of what it returns."""
    whole = operator.default._schema
    taken = [[each.name, str(each.type)] for each in whole.arguments if not each.kwarg_only]
    return [taken, [str(each.type) for each in whole.returns]]


def complaint(attempt) -> str | None:
    try:
        attempt()
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    from torch_tpu import _loader
    from torch_tpu._internal import execution_mode

    from rl_tpu.devices import get_device

    _loader._init_device("tpu")  # also without one
    get_device("tpu").torch_device(0)
    with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH), torch.no_grad():
        print(json.dumps({name: look(name, arguments) for name, arguments in (KERNELS | PLAIN).items()}))
