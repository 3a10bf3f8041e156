"""Work and traffic of programs: every round of a loop counts, kernels count, and the numbers are those of a hand count."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import family_model
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rl_tpu.config.compose import load_config
from rl_tpu.tpu import hlo
from rl_tpu.tpu.flops import count_flops
from rl_tpu.tpu.programs import meta_programs
from rl_tpu.tpu.traffic import Traffic, count_traffic

ROWS, LENGTH = 2, 128
TOKENS = ROWS * LENGTH
HIDDEN, UNITS, HEADS, KEYS, HEAD, VOCABULARY = 64, 96, 4, 2, 32, 257
"""Of the tiny Qwen3: hidden size, units of the MLP, heads, heads of keys and values, their size, entries."""
MATRICES = HIDDEN * HEAD * (2 * HEADS + 2 * KEYS) + 3 * HIDDEN * UNITS
"""Parameters of a layer that tokens are multiplied with."""
PAIRS = ROWS * LENGTH**2 * HEADS * HEAD
"""Multiplications of a product of attention where everything sees everything."""
OUTPUT_LAYER = TOKENS * HIDDEN * VOCABULARY
KERNELS = ("trainer.kernels.attention=splash", "trainer.kernels.head=fused")


@contextmanager
def programs(directory, layers: int, *overrides: str):
    family_model("qwen3", vocabulary=VOCABULARY, num_hidden_layers=layers).save_pretrained(directory)
    sizes = (f"trainer.row_tokens=[{LENGTH}]", f"trainer.microbatch_tokens={TOKENS}")
    config = load_config(["+experiment=quickstart", *sizes, *overrides])
    with meta_programs(config, directory) as found:
        yield found


@pytest.mark.parametrize(
    ("layers", "overrides", "forward_products", "backward_products", "output_layer"),
    [
        # Attention multiplies twice forwards. Backwards it does it again, and four times for its gradients.
        (2, (), 2, 6, 6),
        (4, (), 2, 6, 6),
        # The kernels know that half of all pairs see each other, and need one product again. They compute logits again to
        # know their gradient, which is not useful work.
        (3, KERNELS, 1, 1 + 2.5, 6),
    ],
)
def test_flops_are_those_of_the_matrix_products(
    tmp_path, layers, overrides, forward_products, backward_products, output_layer
):
    with programs(tmp_path, layers, *overrides) as found:
        forward = count_flops(found.logprobs(ROWS, LENGTH).graph)
        whole = count_flops(found.backward(ROWS, LENGTH).graph)
    once = 2 * TOKENS * MATRICES + 2 * PAIRS * forward_products
    assert forward == layers * once + 2 * OUTPUT_LAYER
    # 2 again for what is computed again, but for the layer's last product, whose result nobody needs; 4 for gradients.
    again = 6 * TOKENS * MATRICES - 2 * TOKENS * UNITS * HIDDEN + 2 * PAIRS * backward_products
    assert whole == layers * (once + again) + output_layer * OUTPUT_LAYER


LOOP = """
HloModule hand_written, is_scheduled=true

%update (stack: f32[8,1024], slice: f32[1024], at: s32[]) -> f32[8,1024] {
  %stack = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %slice = f32[1024]{0:T(1024)} parameter(1)
  %row = f32[1,1024]{1,0:T(8,128)} bitcast(%slice)
  %at = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %updated = f32[8,1024]{1,0:T(8,128)} dynamic-update-slice(%stack, %row, %at, %zero)
}

%gather (shard: f32[256]) -> f32[1024] {
  %shard = f32[256]{0:T(256)} parameter(0)
  ROOT %gathered = f32[1024]{0:T(1024)} all-gather(%shard), channel_id=1, dimensions={0}
}

%body (carry: (s32[], f32[8,1024], /*index=2*/f32[8,256])) -> (s32[], f32[8,1024], f32[8,256]) {
  %carry = (s32[]{:T(128)}, f32[8,1024]{1,0:T(8,128)}, /*index=2*/f32[8,256]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%carry), index=0
  %outs = f32[8,1024]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %shards = f32[8,256]{1,0:T(8,128)} get-tuple-element(%carry), index=2
  %none = s32[]{:T(128)S(6)} constant(0)
  %one = f32[1,256]{1,0:T(8,128)S(1)} dynamic-slice(%shards, %i, %none), dynamic_slice_sizes={1,256}
  %flat = f32[256]{0:T(256)S(1)} bitcast(%one)
  %start = ((f32[256]{0:T(256)S(1)}), f32[1024]{0:T(1024)}, u32[]{:S(8)}) async-start(%flat), calls=%gather
  %done = f32[1024]{0:T(1024)} async-done(%start)
  %more = f32[8,1024]{1,0:T(8,128)} fusion(%outs, %done, %i), kind=kLoop, calls=%update
  ROOT %next = (s32[]{:T(128)}, f32[8,1024]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) tuple(%i, %more, %shards)
}

%condition (state: (s32[], f32[8,1024], f32[8,256])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[8,1024]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(8)
  %upper = s32[]{:T(128)} constant(0)
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT, metadata={op_name="jit(f)/while(x"}
}

ENTRY %main (shares: f32[8,256], outputs: f32[8,1024]) -> f32[8,1024] {
  %shares = f32[8,256]{1,0:T(8,128)} parameter(0)
  %outputs = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %first = s32[]{:T(128)S(6)} constant(0)
  %begin = (s32[], f32[8,1024], f32[8,256]) tuple(%first, %outputs, %shares)
  %loop = (s32[], f32[8,1024], f32[8,256]) while(%begin), condition=%condition, body=%body
  %all = f32[8,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %kernel = f32[8,1024]{1,0:T(8,128)} custom-call(%all), custom_call_target="tpu_custom_call"
  ROOT %sum = f32[8,1024]{1,0:T(8,128)} all-reduce(%kernel), channel_id=2, to_apply=%adding
}
"""


def test_a_hand_written_program():
    layer = (
        256 * 4 + 1024 * 4 + 2 * 1024 * 4
    )  # a slice to vector memory; gathered from there; read and put into the stack
    whole = 8 * 1024 * 4
    text = LOOP.replace(", to_apply=%adding", "")
    expected = {"all-gather": (8, 8 * 1024 * 4), "all-reduce": (1, whole)}
    assert count_traffic(text) == Traffic(8 * layer + 4 * whole, expected)
    known = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert count_traffic(known).collectives["all-gather"] == (5, 5 * 1024 * 4)
    estimate = 'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"bytes_accessed":"77"}}'
    text = text.replace('custom_call_target="tpu_custom_call"', estimate)
    assert count_traffic(text).bytes_accessed == 8 * layer + 2 * whole + 77


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no line begins with ENTRY"):
        count_traffic("module @jit_f {}")


LAYERS, SIDE = 6, 4096


def lowered(devices, layers: int, side: int):
    """Gradients of layers x -> tanh(x @ w), [side, side] on each of four devices, that gather their weights."""

    def loss(weights, hidden):
        def layer(hidden, share):
            return jnp.tanh(hidden @ jax.lax.all_gather(share.astype(jnp.bfloat16), "data", tiled=True)), None

        last, _ = jax.lax.scan(jax.checkpoint(layer), hidden, weights)
        return jnp.square(last.astype(jnp.float32)).sum()

    mesh = Mesh(np.array(devices), ("data",))
    function = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data"), check_vma=False
    )
    weights = jax.ShapeDtypeStruct((layers, side, side), "float32")
    return jax.jit(function).lower(weights, jax.ShapeDtypeStruct((len(devices) * side, side), "bfloat16"))


def test_a_loop_that_libtpu_compiled(tmp_path):
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="TPU7x:2x2x1").devices[:4]
    with jax.enable_x64(True):  # as programs are: their loops count in 64 bits, which a TPU has in two halves
        compiled = lowered(devices, LAYERS, SIDE).compile(compiler_options=hlo.written_to(tmp_path))
    found = count_traffic(hlo.text_in(tmp_path))
    matrix = SIDE * SIDE * 2
    assert found.collectives["all-gather"] == (2 * LAYERS, 2 * LAYERS * matrix)  # forwards, and again
    assert found.collectives["reduce-scatter"] == (LAYERS, LAYERS * matrix)
    # In matrices: forwards a product (3), a gather (1), a state that is kept (2). Backwards that state (2), a gather (1),
    # the product again (3), two more that need its result beside their factors (8), and what is scattered (1). Shares
    # are read in bfloat16 and written in float32 (1/4, 1/4, 1/2), and are in vector memory in between. XLA also copies
    # the state once in each loop, to another layout (4): hence the margin.
    by_hand = (6 + 15 + 1) * matrix * LAYERS
    assert by_hand < found.bytes_accessed < 1.4 * by_hand
    assert compiled.cost_analysis()["bytes accessed"] < 0.4 * by_hand  # what XLA says itself


def test_a_loop_that_xla_compiled_for_the_cpu():
    side = 64
    found = count_traffic(lowered(jax.devices()[:4], LAYERS, side).compile().as_text()).collectives
    matrix = side * side * 4  # it computes in float32, and widens before it gathers
    assert found == {
        "all-gather": (2 * LAYERS, 2 * LAYERS * matrix),
        "reduce-scatter": (LAYERS, LAYERS * matrix),
    }
