"""What the output layer takes of a TPU's memory at the size of Qwen3-4B, forward and backward, as libtpu says; no TPU.

    python benchmarks/tpu_head_memory.py [--topologies TPU7x:2x2x1 v6e:2x2] [--tokens 8192] [--tiles 512x512 1024x512]

`plain` is what one would write: all logits in float32, their softmax, and what is read from it. `chunks` is what the
trainer's head does without a kernel: so many tokens at a time, computed again for the backward, the weight's gradient
summed in float32. `fused` is the Pallas kernel with tiles of tokens x vocabulary. Every one takes hidden states [N, D] and
weight [V, D] in bfloat16 and the gradients of N log-probabilities, and returns log-probabilities, entropies and both
gradients; the fused one has the gradient of the entropies as well. Temporary memory is what a program needs beside these.
Flops and bytes are the compiler's: it counts the body of a loop once, so those of `chunks` are of one chunk.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rl_tpu.tpu.kernels.fused_logprobs import fused_logprobs, fused_logprobs_backward

VOCABULARY, WIDTH = 151_936, 2560
CHUNK = 128
"""Tokens; nearest power of two to what `rl_tpu.algorithms.logprobs` takes of this vocabulary."""
MIB = 1 << 20


def read(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies, which have no gradient."""
    logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
    table = jax.nn.log_softmax(logits, -1)
    entropy = -jnp.sum(jnp.exp(table) * table, -1)
    return jnp.take_along_axis(table, labels[:, None], 1)[:, 0], jax.lax.stop_gradient(entropy)


def plain(hidden, weight, labels, upstream):
    (logprobs, entropy), gradient = jax.vjp(lambda hidden, weight: read(hidden, weight, labels), hidden, weight)
    return logprobs, entropy, *gradient((upstream, jnp.zeros_like(entropy)))


def chunks(hidden, weight, labels, upstream):
    def forward(operands):
        states, places = operands
        return read(states, weight, places)

    def backward(total, operands):
        states, places, of_logprob = operands
        (_, entropy), gradient = jax.vjp(lambda states, weight: read(states, weight, places), states, weight)
        into_states, into_weight = gradient((of_logprob, jnp.zeros_like(entropy)))
        return total + into_weight.astype(jnp.float32), into_states

    cut = [each.reshape(-1, CHUNK, *each.shape[1:]) for each in (hidden, labels, upstream)]
    logprobs, entropy = jax.lax.map(forward, (cut[0], cut[1]))
    total, into_hidden = jax.lax.scan(backward, jnp.zeros(weight.shape, jnp.float32), tuple(cut))
    return logprobs.reshape(-1), entropy.reshape(-1), into_hidden.reshape(hidden.shape), total.astype(weight.dtype)


def fused(hidden, weight, labels, upstream, tiles):
    logprobs, entropy, normalizer = fused_logprobs(hidden, weight, labels, 1.0, *tiles)
    gradients = fused_logprobs_backward(
        upstream, jnp.zeros_like(upstream), hidden, weight, labels, entropy, normalizer, 1.0, *tiles
    )
    return logprobs, entropy, *gradients


def line(topology: str, name: str, function: Callable, tokens: int) -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    shape = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    operands = [
        shape((tokens, WIDTH), jnp.bfloat16),
        shape((VOCABULARY, WIDTH), jnp.bfloat16),
        shape((tokens,), jnp.int32),
        shape((tokens,), jnp.float32),
    ]
    started = time.perf_counter()
    try:
        compiled = jax.jit(function).lower(*operands).compile()
    except jax.errors.JaxRuntimeError as error:
        print(f"{topology:12} {name:16} {str(error).splitlines()[0]}", flush=True)
        return
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    print(
        f"{topology:12} {name:16} {memory.temp_size_in_bytes / MIB:12,.1f} {memory.output_size_in_bytes / MIB:12,.1f}"
        f" {cost['flops'] / 1e12:9.2f} {cost['bytes accessed'] / 1e9:9.2f} {time.perf_counter() - started:10.1f}",
        flush=True,
    )


def tile_sizes(text: str) -> tuple[int, int]:
    tokens, vocabulary = map(int, text.split("x"))
    return tokens, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["TPU7x:2x2x1", "v6e:2x2"])
    parser.add_argument("--tokens", type=int, default=8192, help=f"a multiple of {CHUNK}")
    parser.add_argument("--tiles", nargs="+", type=tile_sizes, default=[(512, 512), (1024, 512)])
    options = parser.parse_args()
    paths = {"plain": plain, "chunks": chunks}
    paths |= {f"fused {t}x{v}": partial(fused, tiles=(t, v)) for t, v in options.tiles}
    print(
        f"{'topology':12} {'head':16} {'temp MiB':>12} {'output MiB':>12} {'Tflop':>9} {'GB moved':>9} {'compile s':>10}"
    )
    for topology in options.topologies:
        for name, function in paths.items():
            line(topology, name, function, options.tokens)


if __name__ == "__main__":
    main()
