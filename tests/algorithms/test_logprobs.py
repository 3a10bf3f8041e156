"""Log-probabilities and entropies in chunks against whole logits in float64 and autograd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.logprobs import hidden_logprobs

N, D, V = 23, 6, 37
DISTRIBUTIONS = {
    "whole": Distribution(),
    "temperature": Distribution(0.6),
    "top_p": Distribution(0.8, top_p=0.7),
    "top_k": Distribution(1.0, top_k=5),
    "one_token": Distribution(1.3, top_k=1),
    "both": Distribution(0.7, top_p=0.6, top_k=9),
    "tiny_top_p": Distribution(1.0, top_p=1e-6),
    "min_p": Distribution(1.1, min_p=0.2),
    "all": Distribution(0.9, top_p=0.8, top_k=9, min_p=0.1),
}


def inputs(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = 1.5 * torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[torch.tensor([0, 7, 8, N - 1])] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def upstream(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients that come for log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, N, generator=generator, dtype=torch.float64).unbind()


def kept_tokens(logits: torch.Tensor, label: int, distribution: Distribution) -> list[int]:
    """Of one distribution, token by token: in order of probability until top_p of it or top_k of them are passed, or one is
    less likely than min_p times the likeliest."""
    probabilities = torch.softmax(logits, -1).tolist()
    kept, passed = [], 0.0
    for rank, token in enumerate(sorted(range(len(probabilities)), key=lambda token: -probabilities[token])):
        if passed > distribution.top_p or (0 < distribution.top_k <= rank):
            break
        if probabilities[token] < distribution.min_p * max(probabilities):
            break
        kept.append(token)
        passed += probabilities[token]
    return kept if label in kept or label < 0 else [*kept, label]


def written_out(hidden, weight, labels, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin: whole logits, one position at a time; autograd gives the gradients."""
    logprobs, entropies = [], []
    for state, label in zip(hidden, labels.tolist(), strict=True):
        logits = weight @ state / distribution.temperature
        kept = kept_tokens(logits.detach(), label, distribution)
        table = torch.log_softmax(logits[kept], -1)
        logprobs.append(table[kept.index(label)] if label >= 0 else 0 * table[0])
        entropies.append(-(table.exp() * table).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def results(function, hidden, weight, *arguments, entropy_gradient: bool, **options) -> list[torch.Tensor]:
    """Both outputs and the gradients of hidden states and weight."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = function(hidden, weight, *arguments, **options)
    for_logprobs, for_entropy = upstream()
    loss = (logprobs * for_logprobs).sum()
    if entropy_gradient:
        loss = loss + (entropy * for_entropy).sum()
    loss.backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("chunk_logits", [1, 5 * V, 1 << 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_values_and_gradients_equal_whole_logits(name, chunk_logits, dtype, tolerance, entropy_gradient):
    hidden, weight, labels = inputs()
    expected = results(written_out, hidden, weight, labels, DISTRIBUTIONS[name], entropy_gradient=entropy_gradient)
    options = {"entropy_gradient": entropy_gradient, "chunk_logits": chunk_logits}

    def ours(*arguments):
        return hidden_logprobs(*arguments, **options)

    found = results(ours, *inputs(dtype), DISTRIBUTIONS[name], entropy_gradient=entropy_gradient)
    for value, twin in zip(found, expected, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), twin, rtol=tolerance, atol=tolerance)


def test_the_entropy_carries_a_gradient_only_when_asked():
    hidden, weight, labels = inputs()
    _, entropy = hidden_logprobs(hidden.requires_grad_(), weight, labels, Distribution())
    assert not entropy.requires_grad


@pytest.mark.parametrize("labels", [[-100] * 4, [-100, 3, -100, -100]])
def test_no_label_and_a_single_one(labels):
    hidden, weight, _ = inputs()
    hidden = hidden[: len(labels)].requires_grad_()
    weight.requires_grad_()
    labels = torch.tensor(labels, dtype=torch.int64)
    logprobs, entropy = hidden_logprobs(hidden, weight, labels, Distribution(0.6), chunk_logits=2 * V)
    expected, _ = written_out(hidden, weight, labels, Distribution(0.6))
    torch.testing.assert_close(logprobs, expected)
    found = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    wanted = torch.autograd.grad(expected.sum(), [hidden, weight])
    for gradient, twin in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, twin)
    assert entropy.shape == labels.shape


def test_no_position_at_all_still_has_a_gradient():
    hidden, weight, labels = inputs()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    logprobs, entropy = hidden_logprobs(hidden, weight, labels[:0], Distribution(top_p=0.5), entropy_gradient=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, D)
    assert not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, labels = inputs()
    hidden_logprobs(hidden.requires_grad_(), weight, labels, Distribution())[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_label_outside_of_the_truncated_distribution_is_kept():
    hidden, weight, labels = inputs()
    labels = (hidden @ weight.T).argmin(1)
    logprobs, _ = hidden_logprobs(hidden, weight, labels, Distribution(top_k=3))
    assert logprobs.isfinite().all()
    assert (logprobs < 0).all()


def test_equal_logits_are_truncated_to_as_many():
    """Whichever of equal tokens the engine kept, it kept so many."""
    hidden, weight = torch.ones(1, 1), torch.ones(8, 1)
    for distribution, kept in [(Distribution(top_k=3), 3), (Distribution(top_p=0.5), 5)]:
        _, entropy = hidden_logprobs(hidden, weight, torch.tensor([0]), distribution)
        assert entropy.item() == pytest.approx(torch.tensor(float(kept)).log().item())


def test_half_precision_is_computed_in_float32():
    hidden, weight, labels = inputs(torch.bfloat16)
    found = results(hidden_logprobs, hidden, weight, labels, Distribution(), entropy_gradient=False, chunk_logits=3 * V)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert found[2].dtype == found[3].dtype == torch.bfloat16
    logits = (hidden @ weight.T).double()  # as the matrix product rounds them
    exact = torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)
    expected = results(written_out, hidden.double(), weight.double(), labels, Distribution(), entropy_gradient=False)
    for gradient, twin in zip(found[2:], expected[2:], strict=True):
        assert (gradient.double() - twin).norm() < 1e-2 * twin.norm()


def test_logits_never_exist_whole():
    """The largest tensor that forward and backward make is a chunk of logits, or the weight's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 4, generator=generator, requires_grad=True)
    weight = torch.randn(1000, 4, generator=generator, requires_grad=True)
    labels = torch.randint(0, 1000, (256,), generator=generator)
    with Largest() as largest:
        logprobs, entropy = hidden_logprobs(
            hidden, weight, labels, Distribution(top_p=0.9), entropy_gradient=True, chunk_logits=16_000
        )
        (logprobs + entropy).sum().backward()
    assert 4000 < largest.elements <= 16_000


def test_a_vocabulary_divided_among_two_ranks_gives_the_same(tmp_path):
    """37 rows: the ranks hold 19 and 18. Every rank has the result; the parts of hidden's gradient add up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("vocabulary_program.py")
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, distribution in DISTRIBUTIONS.items():
        expected = results(written_out, *inputs(), distribution, entropy_gradient=True)
        for rank in (first[name], second[name]):
            torch.testing.assert_close(rank[:2], expected[:2])
        torch.testing.assert_close(first[name][2] + second[name][2], expected[2])
        torch.testing.assert_close(torch.cat([first[name][3], second[name][3]]), expected[3])
