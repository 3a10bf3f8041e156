"""The fused output layer: the operator and its JAX twin against the definition in float64, and libtpu's word on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from topologies import compiled_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.logprobs import hidden_logprobs
from rl_tpu.config.schema import KernelConfig
from rl_tpu.errors import UserError
from rl_tpu.tpu.kernels import fused_logprobs as twin
from rl_tpu.trainer.kernels.fused_logprobs import fused_logprobs

TOKENS, VOCABULARY, HIDDEN = 150, 333, 48
NUMBERS = 0.7, 64, 128
"""Temperature, and tiles: neither divides its dimension."""
TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 1e-2}


def make_operands(lowest: float = 0.0) -> list[torch.Tensor]:
    """hidden, weight, and gradients of log-probabilities and entropies, float64, with values that bfloat16 has; every
    logit is less by `lowest`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (TOKENS,), (TOKENS,)]
    hidden, weight, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    hidden[:, 0], weight[:, 0] = lowest, -1
    return [tensor.bfloat16().double() for tensor in (hidden, weight * 0.5, *gradients)]


@pytest.fixture(scope="module")
def operands() -> list[torch.Tensor]:
    return make_operands()


@pytest.fixture(scope="module")
def labels() -> torch.Tensor:
    """Some of them padding; the first and the last of the vocabulary are among them."""
    found = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    found[::7], found[1], found[-1] = -1, 0, VOCABULARY - 1
    return found


def written_out(operands: list[torch.Tensor], labels: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities, entropies, normalizers, and the gradients of hidden and weight, by the definition."""
    hidden, weight, *gradients = (tensor.clone().requires_grad_() for tensor in operands)
    logits = hidden @ weight.T / NUMBERS[0]
    table = logits.log_softmax(1)
    logprobs = torch.where(labels >= 0, table.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0)
    entropy = -(table.exp() * table).sum(1)
    torch.autograd.backward([logprobs, entropy], gradients)
    return [tensor.detach() for tensor in (logprobs, entropy, logits.logsumexp(1), hidden.grad, weight.grad)]


def compare(found, expected: list[torch.Tensor], tolerance: float) -> None:
    """In units of the largest expected value."""
    for ours, theirs in zip(found, expected, strict=True):
        ours = torch.as_tensor(np.asarray(ours, np.float64)) if isinstance(ours, jax.Array) else ours.double()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_operator_equals_the_definition(operands, labels, dtype):
    hidden, weight = (tensor.clone().to(getattr(torch, dtype)).requires_grad_() for tensor in operands[:2])
    found = fused_logprobs(hidden, weight, labels, *NUMBERS)
    assert not found[2].requires_grad
    torch.autograd.backward(found[:2], [gradient.to(found[0].dtype) for gradient in operands[2:]])
    expected = written_out(operands, labels)
    compare(
        [tensor.detach() for tensor in found], expected[:3], TOLERANCE["float64" if dtype == "float64" else "float32"]
    )
    compare([hidden.grad, weight.grad], expected[3:], TOLERANCE[dtype])


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_the_operator_equals_the_head_that_works_by_chunks(operands, labels, entropy_gradient):
    def results(function):
        hidden, weight = (tensor.float().requires_grad_() for tensor in operands[:2])
        logprobs, entropy = function(hidden, weight)
        loss = (logprobs * operands[2]).sum() + ((entropy * operands[3]).sum() if entropy_gradient else 0)
        return [tensor.detach() for tensor in (logprobs, entropy, *torch.autograd.grad(loss, [hidden, weight]))]

    expected = results(
        lambda hidden, weight: hidden_logprobs(
            hidden, weight, labels, Distribution(NUMBERS[0]), entropy_gradient=entropy_gradient
        )
    )
    compare(
        results(lambda hidden, weight: fused_logprobs(hidden, weight, labels, *NUMBERS)[:2]),
        [tensor.double() for tensor in expected],
        TOLERANCE["float32"],
    )


def test_no_tokens_have_no_results(operands, labels):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in operands[:2])
    logprobs, entropy, _ = fused_logprobs(hidden[:0], weight, labels[:0], *NUMBERS)
    (logprobs.sum() + entropy.sum()).backward()
    assert len(logprobs) == len(entropy) == 0
    assert not weight.grad.any()


def test_the_operator_keeps_its_promises_to_the_compiler(operands, labels):
    hidden, weight = (tensor[:20].clone().requires_grad_() for tensor in operands[:2])
    kept = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_logprobs, (hidden, weight, labels[:20] // 20, *NUMBERS), test_utils=kept)


def test_a_captured_program_holds_the_two_operators_and_no_logits():
    def gradients(hidden, weight, labels):
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        logprobs, entropy, _ = fused_logprobs(hidden, weight, labels, *NUMBERS)
        return torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight])

    with FakeTensorMode():
        hidden, weight = torch.empty(TOKENS, HIDDEN), torch.empty(VOCABULARY, HIDDEN)
        graph = make_fx(gradients)(hidden, weight, torch.empty(TOKENS, dtype=torch.int64)).graph
    names = [node.target._schema.name for node in graph.nodes if hasattr(node.target, "_schema")]
    assert [name for name in names if "fused" in name] == [
        "rl_tpu::fused_logprobs",
        "rl_tpu::fused_logprobs_backward",
    ]
    made = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert max(tensor.numel() for tensor in made) < TOKENS * VOCABULARY


def forward_and_backward(hidden, weight, of_logprob, of_entropy, labels):
    logprobs, entropy, normalizer = twin.fused_logprobs(hidden, weight, labels, *NUMBERS, interpret=True)
    gradients = twin.fused_logprobs_backward(
        of_logprob, of_entropy, hidden, weight, labels, entropy, normalizer, *NUMBERS, interpret=True
    )
    return logprobs, entropy, normalizer, *gradients


@pytest.mark.parametrize("lowest", [0, 400])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_equal_the_definition(labels, dtype, lowest):
    operands = make_operands(lowest)
    with jax.enable_x64(True):  # as in the programs that the kernels are put into
        matrices = [jnp.asarray(tensor.numpy(), dtype) for tensor in operands[:2]]
        found = jax.jit(forward_and_backward)(*matrices, *(g.float().numpy() for g in operands[2:]), labels.numpy())
    assert [str(array.dtype) for array in found] == ["float32"] * 3 + [dtype] * 2
    expected = written_out(operands, labels)
    # Logits of some hundreds have the fewer digits after the point.
    exact = 5e-5 if lowest else TOLERANCE["float32"]
    compare(found[:3], expected[:3], exact)
    compare(found[3:], expected[3:], max(exact, TOLERANCE[dtype]))


def test_shares_of_the_tokens_make_parts_of_the_weight_s_gradient(operands, labels):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"))
    forward, backward = twin.FUSED_LOGPROBS, twin.FUSED_LOGPROBS_BACKWARD

    def share(*arguments):
        *results, of_weight = forward_and_backward(*arguments)
        return *results, jax.lax.psum(of_weight, "data")

    assert backward.reduced == (1,)
    divided = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(*forward.inputs[:2], *backward.inputs[:2], forward.inputs[2]),
        out_specs=(*forward.outputs, *backward.outputs),
        check_vma=False,
    )
    found = jax.jit(divided)(*(tensor.float().numpy() for tensor in operands), labels.int().numpy())
    compare(found, written_out(operands, labels), TOLERANCE["float32"])


def test_the_kernels_report_their_products():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((10, 4), (30, 4), (10,))]
    assert twin.FUSED_LOGPROBS.flops(*shapes, *NUMBERS) == 2 * 10 * 30 * 4
    arguments = [shapes[2], shapes[2], *shapes[:2], *[shapes[2]] * 3]
    assert twin.FUSED_LOGPROBS_BACKWARD.flops(*arguments, *NUMBERS) == 2 * 2 * 10 * 30 * 4


def compile_both(topology: str, tokens: int, vocabulary: int, width: int, tiles: tuple[int, int], dtype=jnp.bfloat16):
    def both(hidden, weight, of_logprob, of_entropy, labels):
        logprobs, entropy, normalizer = twin.fused_logprobs(hidden, weight, labels, 0.7, *tiles)
        return logprobs, *twin.fused_logprobs_backward(
            of_logprob, of_entropy, hidden, weight, labels, entropy, normalizer, 0.7, *tiles
        )

    with jax.enable_x64(True):
        matrices = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((tokens, width), (vocabulary, width))]
        numbers = jax.ShapeDtypeStruct((tokens,), jnp.float32)
        return compiled_for(topology, both, *matrices, numbers, numbers, jax.ShapeDtypeStruct((tokens,), jnp.int64))


DEFAULTS = KernelConfig().head_block_tokens, KernelConfig().head_block_vocabulary


@pytest.mark.parametrize("tiles", [DEFAULTS, (128, 256)])
@pytest.mark.parametrize("topology", ["TPU7x:2x2x1", "v6e:2x2"])
def test_libtpu_compiles_forward_and_backward(topology, tiles):
    tokens, vocabulary = 1000, 20_011
    memory = compile_both(topology, tokens, vocabulary, 256, tiles).memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocabulary / 4


def test_libtpu_compiles_tiles_larger_than_what_there_is_and_float32():
    compile_both("v6e:2x2", 72, 257, 64, DEFAULTS, jnp.float32)


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        ((100, 512), "trainer.kernels.head_block_tokens: 100 is not a multiple of 128"),
        ((512, 64), "trainer.kernels.head_block_vocabulary: 64 is not a multiple of 128"),
        ((4096, 512), "head_block_tokens=4096 by head_block_vocabulary=512 take .* MiB .*: use 1024 by 512"),
    ],
)
def test_tiles_that_a_tpu_has_no_room_for_are_refused(tiles, words):
    hidden, weight = (jax.ShapeDtypeStruct((count, 2560), jnp.bfloat16) for count in (8192, 151_936))
    with pytest.raises(UserError, match=words):
        twin.fused_logprobs(hidden, weight, None, 1.0, *tiles)
