"""Objectives against the papers' formulas, one token at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import twins
from batches import Batch, Rows, agree, random_batch, rows_of

from rl_tpu.algorithms.objectives import Bounds, Objective, cispo, clip, find_objective
from rl_tpu.algorithms.ratios import MAX_LOG_RATIO, log_ratio
from rl_tpu.errors import UserError

BOUNDS = [Bounds(0.2, 0.2), Bounds(0.1, 0.4), Bounds(0.2, 0.28, 1.5), Bounds(1.0, 4.0)]
CASES = [("clip", clip, twins.clip), ("cispo", cispo, twins.cispo)]


def both(objective, twin, batch: Batch, rows: Rows, bounds: Bounds, level: str):
    """The packed result with the gradient of its summed loss, and the twin's."""
    logprobs = rows.tensor(batch.logprobs).requires_grad_()
    mask = rows.tensor(batch.masks, 0)
    ratios = log_ratio(logprobs, rows.tensor(batch.old), mask, rows.segment_ids, level)
    found = objective(ratios, logprobs, rows.tensor(batch.advantages), mask, bounds)
    found.loss.sum().backward()

    def tokens(values):
        held = twins.log_ratios(values, batch.old, batch.masks, level)
        return [
            [
                twin(held[s][t], values[s][t], batch.advantages[s][t], *bounds) if inside else (0.0, 0.0, False)
                for t, inside in enumerate(mask)
            ]
            for s, mask in enumerate(batch.masks)
        ]

    def loss(values):
        return sum(token[0] for own in tokens(values) for token in own)

    return found, logprobs.grad, tokens(batch.logprobs), loss


@pytest.mark.parametrize(("name", "objective", "twin"), CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradient(name, objective, twin, level, bounds, seed):
    batch = random_batch(seed)
    rows = rows_of(batch, seed)
    found, gradient, expected, loss = both(objective, twin, batch, rows, bounds, level)
    for part, packed in enumerate(found):
        agree(rows.samples(packed), [[float(token[part]) for token in own] for own in expected])
    agree(rows.samples(gradient), twins.gradient(loss, batch.logprobs))
    if name == "clip":  # a stopped gradient is none that differences could see
        agree(rows.samples(gradient), twins.finite_differences(loss, batch.logprobs), abs=1e-7)
    assert not found.ratio.requires_grad
    assert not found.clipped.requires_grad


@pytest.mark.parametrize(("name", "objective", "twin"), CASES)
@pytest.mark.parametrize("apart", [30.0, 1000.0])
def test_ratios_that_overflow_leave_loss_and_gradient_finite(name, objective, twin, apart):
    batch = random_batch(11, apart=apart)
    rows = rows_of(batch)
    found, gradient, expected, loss = both(objective, twin, batch, rows, Bounds(0.2, 0.2), "token")
    agree(rows.samples(found.loss), [[float(token[0]) for token in own] for own in expected])
    agree(rows.samples(gradient), twins.gradient(loss, batch.logprobs))
    assert gradient.isfinite().all()


def tokens(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, ...]:
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    return logprobs, torch.tensor([advantages], dtype=torch.float64), torch.ones(1, len(ratios))


def test_clip_case_by_case():
    """Ratios inside, above and below, for either sign of the advantage."""
    logprobs, advantages, mask = tokens([1.1, 1.5, 0.5, 1.1, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    found = clip(logprobs, logprobs, advantages, mask, Bounds(0.2, 0.3))
    assert found.loss.tolist()[0] == pytest.approx([-2.2, -2.6, -1.0, 2.2, 3.0, 1.6])
    assert found.clipped.tolist() == [[0, 1, 0, 0, 0, 1]]
    found.loss.sum().backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-2.2, 0.0, -1.0, 2.2, 3.0, 0.0])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    logprobs, advantages, mask = tokens([2.9, 3.1, 50.0, 50.0, 1.0], [-2.0, -2.0, -2.0, 2.0, -2.0])
    found = clip(logprobs, logprobs, advantages, mask, Bounds(0.2, 0.2, dual_clip=3.0))
    assert found.loss.tolist()[0] == pytest.approx([5.8, 6.0, 6.0, -2.4, 2.0])
    assert found.clipped.tolist() == [[0, 1, 1, 1, 0]]
    found.loss.sum().backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([5.8, 0.0, 0.0, 0.0, 2.0])


def test_cispo_gives_every_token_a_gradient():
    logprobs, advantages, mask = tokens([0.01, 1.0, 100.0], [1.0, 1.0, 1.0])
    found = cispo(logprobs, logprobs, advantages, mask, Bounds(1.0, 4.0))
    found.loss.sum().backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-0.01, -1.0, -5.0])
    assert found.clipped.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("objective", [clip, cispo])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_on_policy_the_gradient_is_that_of_reinforce(objective, bounds):
    """At ratio 1 every objective is advantage times the gradient of the log-probability (REINFORCE)."""
    logprobs = torch.full((1, 3), -0.7, requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -2.0, 0.0]]), torch.ones(1, 3)
    ratios = log_ratio(logprobs, logprobs.detach(), mask, torch.tensor([[1, 2, 3]]), "token")
    found = objective(ratios, logprobs, advantages, mask, bounds)
    assert found.ratio.tolist() == [[1, 1, 1]]
    assert found.clipped.tolist() == [[0, 0, 0]]
    found.loss.sum().backward()
    assert logprobs.grad.tolist() == [[-1, 2, 0]]


@pytest.mark.parametrize("objective", [clip, cispo])
def test_nothing_under_the_mask_is_all_zero(objective):
    nothing = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3)
    ratios = log_ratio(nothing, nothing, mask, torch.zeros(2, 3, dtype=torch.int64), "token")
    found = objective(ratios, nothing, nothing.detach(), mask, Bounds(0.2, 0.2))
    assert all((part == 0).all() for part in found)
    found.loss.sum().backward()
    assert (nothing.grad == 0).all()


@pytest.mark.parametrize("objective", [clip, cispo])
def test_half_precision_comes_out_in_float32(objective):
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 2)
    ratios = log_ratio(logprobs, logprobs.detach() - 0.125, mask, torch.ones(1, 2, dtype=torch.int64), "token")
    found = objective(ratios, logprobs, torch.ones(1, 2), mask, Bounds(0.2, 0.2))
    assert {part.dtype for part in found} == {torch.float32}
    assert float(found.ratio[0, 0]) == pytest.approx(math.exp(0.125))


def test_a_token_the_sampler_thought_impossible_stays_finite():
    one = torch.ones(1, 1)
    ratios = log_ratio(-0.1 * one, -200 * one, one, one.long(), "token")
    assert float(clip(ratios, one, -one, one, Bounds(0.2, 0.2)).loss) == pytest.approx(math.exp(MAX_LOG_RATIO))


MINE = """
import torch
from rl_tpu.algorithms.objectives import Objective

def good(log_ratio, logprobs, advantages, mask, bounds):
    ratio = log_ratio.exp()
    return Objective(-ratio * advantages * mask, ratio.detach() * mask, torch.zeros_like(ratio))

def four(log_ratio, logprobs, advantages, mask):
    return good(log_ratio, logprobs, advantages, mask, None)

def tensor(log_ratio, logprobs, advantages, mask, bounds):
    return -log_ratio.exp() * advantages * mask

def summed(log_ratio, logprobs, advantages, mask, bounds):
    return Objective(*(part.sum() for part in good(log_ratio, logprobs, advantages, mask, bounds)))

def stopped(log_ratio, logprobs, advantages, mask, bounds):
    return good(log_ratio.detach(), logprobs, advantages, mask, bounds)

def unmasked(log_ratio, logprobs, advantages, mask, bounds):
    return good(log_ratio, logprobs, advantages, torch.ones_like(mask), bounds)

def raises(log_ratio, logprobs, advantages, mask, bounds):
    return log_ratio + bounds.nothing

constant = 3
"""


@pytest.fixture
def my_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objectives.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def test_objectives_are_found_by_name_and_by_import_path(my_objectives):
    assert find_objective("clip") is clip
    assert find_objective("cispo") is cispo
    logprobs, advantages, mask = tokens([1.5], [2.0])
    found = find_objective("my_objectives:good")(logprobs, logprobs, advantages, mask, Bounds(0.2, 0.2))
    assert isinstance(found, Objective)
    assert float(found.loss.detach()) == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clpi", "unknown objective 'clpi', did you mean 'clip'? (known: cispo, clip)"),
        ("my_objectives:god", "did you mean 'good'?"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("my_objectives:constant", "is not callable"),
        ("my_objectives:four", "is called with (log_ratio, logprobs, advantages, mask, bounds)"),
        ("my_objectives:tensor", "returned a Tensor, not an Objective"),
        ("my_objectives:summed", "[(), (), ()]"),
        ("my_objectives:stopped", "has no gradient"),
        ("my_objectives:unmasked", "the loss of a token outside the mask is -1.0, not 0"),
        ("my_objectives:raises", "AttributeError: 'Bounds' object has no attribute 'nothing'"),
    ],
)
def test_an_objective_that_cannot_work_is_refused_in_one_line(my_objectives, name, message):
    with pytest.raises(UserError) as caught:
        find_objective(name)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
