"""What libtpu says one layer's attention takes on a TPU, forward and backward, plain and as splash attention.

    python benchmarks/tpu_attention_memory.py --tokens 2048 4096 8192

Both are the trainer's own module, captured, lowered by torch_tpu and compiled ahead of time for one device: no TPU is
needed, and nothing runs. Sizes are Qwen3-4B's by default.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a cloud's metadata server, and waits for the answer
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from rl_tpu.devices import get_device, prepare_torchtitan

prepare_torchtitan(get_device("cpu"))

import jax  # noqa: E402
import torch  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from rl_tpu.config.schema import KernelConfig  # noqa: E402
from rl_tpu.tpu.compose import compose  # noqa: E402
from rl_tpu.tpu.partition import Partition, jax_dtype  # noqa: E402
from rl_tpu.trainer.attention import SegmentAttention, segment_mask  # noqa: E402
from rl_tpu.trainer.graph.capture import capture  # noqa: E402

MIB = 2**20


def attention(kind: str, kernels: KernelConfig):
    """Output and gradients, from q, k, v, segment ids and the output's gradient."""
    module = SegmentAttention(
        SegmentAttention.Config(block_q=kernels.attention_block_q, block_kv=kernels.attention_block_kv)
    )

    def both(q, k, v, segment_ids, grad):
        mask = segment_ids.int() if kind == "splash" else segment_mask(segment_ids, torch.zeros_like(segment_ids))
        operands = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = module(*operands, attention_masks=mask, enable_gqa=True)
        return [out, *torch.autograd.grad(out, operands, grad)]

    return both


def compiled(topology: str, kind: str, kernels: KernelConfig, operands: Sequence[torch.Tensor]):
    """The executable for one device of the topology."""
    sharding = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])
    function = compose(capture(attention(kind, kernels), operands), Partition().operators({}))
    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(each.shape, jax_dtype(each.dtype), sharding=sharding) for each in operands]
        return jax.jit(function).lower(*shapes).compile()


def row(topology: str, kind: str, kernels: KernelConfig, options: argparse.Namespace, tokens: int) -> list[str]:
    """One line of the table."""
    shapes = [(1, tokens, heads, options.dim) for heads in (options.heads, options.kv_heads, options.kv_heads)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    tiles = f"{kernels.attention_block_q} x {kernels.attention_block_kv}" if kind == "splash" else ""
    start = time.perf_counter()
    try:
        memory = compiled(topology, kind, kernels, (q, k, v, ids, q)).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return [topology, str(tokens), kind, tiles, str(error).strip().splitlines()[0][:60], "", ""]
    seconds = time.perf_counter() - start
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes + memory.output_size_in_bytes
    return [topology, str(tokens), kind, tiles, *(f"{size / MIB:,.0f}" for size in sizes), f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=["TPU7x:2x2x1", "v6e:2x2"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--block-q", type=int, default=KernelConfig().attention_block_q)
    parser.add_argument("--block-kv", type=int, default=KernelConfig().attention_block_kv)
    options = parser.parse_args()
    kernels = KernelConfig(attention_block_q=options.block_q, attention_block_kv=options.block_kv)
    table = Table(
        "topology", "tokens", "attention", "tiles", "temporaries MiB", "operands, results MiB", "compiled in s"
    )
    for topology in options.topologies:
        for tokens in options.tokens:
            for kind in ("plain", "splash"):
                table.add_row(*row(topology, kind, kernels, options, tokens))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
