"""Every preset, from rewards to the gradient of every log-probability, against the formula of its paper.

The batch has uneven groups (one of a single sample, one of equal rewards) and uneven answers (one empty, one without a
token of the policy).
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
import twins
from batches import Rows, agree
from papers import OVERLONG_BUFFER, PAPERS, Case, rloo

from rl_tpu.algorithms.advantages import advantages
from rl_tpu.algorithms.aggregation import token_weights
from rl_tpu.algorithms.kl import kl
from rl_tpu.algorithms.masked import masked, usable_tokens
from rl_tpu.algorithms.objectives import Bounds, find_objective
from rl_tpu.algorithms.overlong import soft_overlong_penalty
from rl_tpu.algorithms.ratios import log_ratio
from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import AlgorithmConfig

MAX_RESPONSE_TOKENS = 9


def case(seed: int, on_policy: bool = False, apart: float = 0.3) -> Case:
    draw = random.Random(seed)
    groups, samples = [], 0
    for size in (4, 1, 3, 5, 2):
        groups.append(list(range(samples, samples + size)))
        samples += size
    rewards = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(samples)]
    for sample in groups[4]:
        rewards[sample] = 1.0
    lengths = [draw.randint(1, MAX_RESPONSE_TOKENS) for _ in range(samples)]
    lengths[2], lengths[6] = 0, MAX_RESPONSE_TOKENS
    masks = [[int(draw.random() < 0.8) for _ in range(length)] for length in lengths]
    masks[5] = [0] * lengths[5]
    old = [[-3 * draw.random() for _ in range(length)] for length in lengths]

    def near(values):
        return [[value + draw.gauss(0, apart) for value in own] for own in values]

    logprobs = old if on_policy else near(old)
    return Case(groups, rewards, masks, logprobs, old, near(old), MAX_RESPONSE_TOKENS)


def composed(config: AlgorithmConfig, case: Case, dtype=torch.float64) -> tuple[float, list[list[float]]]:
    """The loss and its gradient as the parts that `config` names make it, in packed rows."""
    rewards = list(case.rewards)
    rows = Rows([len(mask) for mask in case.masks], seed=3)
    mask, old, reference = (rows.tensor(v, 0, dtype) for v in (case.masks, case.old, case.reference))
    if config.kl.place == "reward":
        distances = rows.samples(masked(kl(old, reference, config.kl.estimator), mask))
        rewards = [r - config.kl.coefficient * math.fsum(own) for r, own in zip(rewards, distances, strict=True)]
    rewards = [
        reward
        + soft_overlong_penalty(len(own), MAX_RESPONSE_TOKENS, config.overlong_buffer_tokens, config.overlong_penalty)
        for reward, own in zip(rewards, case.masks, strict=True)
    ]
    of_groups = advantages([[rewards[i] for i in group] for group in case.groups], config.baseline, config.scale)
    of_samples = [advantage for own in of_groups for advantage in own]
    of_tokens = rows.tensor([[a] * len(own) for a, own in zip(of_samples, case.masks, strict=True)], 0, dtype)

    logprobs = rows.tensor(case.logprobs, 0, dtype).requires_grad_()
    usable = usable_tokens(mask, logprobs, old, reference)
    ratios = log_ratio(logprobs, old, usable, rows.segment_ids, config.ratio)
    bounds = Bounds(config.clip_low, config.clip_high, config.dual_clip)
    loss = find_objective(config.objective)(ratios, logprobs, of_tokens, usable, bounds).loss
    if config.kl.coefficient and config.kl.place == "loss":
        loss = loss + config.kl.coefficient * masked(kl(logprobs, reference, config.kl.estimator), usable)
    weights = token_weights(usable, rows.sample_ids, config.aggregation, MAX_RESPONSE_TOKENS)
    total = (loss * weights).sum()
    total.backward()
    return float(total.detach()), rows.samples(logprobs.grad)


@cache
def preset(name: str, *changes: str) -> AlgorithmConfig:
    """configs/algorithm/NAME.yaml with changes."""
    buffer = f"algorithm.overlong_buffer_tokens={OVERLONG_BUFFER if name == 'dapo' else 0}"
    return load_config(["+experiment=quickstart", f"algorithm={name}", buffer, *changes]).algorithm


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_paper(name, seed):
    file, paper, changes = PAPERS[name]
    batch = case(seed)
    loss, gradient = composed(preset(file, *changes), batch)
    assert loss == pytest.approx(twins.constant(paper(batch, batch.logprobs)), rel=1e-6, abs=1e-9)
    expected = twins.gradient(lambda logprobs: paper(batch, logprobs), batch.logprobs)
    assert any(value for own in expected for value in own)
    agree(gradient, expected, rel=1e-6, abs=1e-9)
    if name != "cispo":  # its weight has no gradient, which differences do not know
        agree(gradient, twins.finite_differences(lambda own: paper(batch, own), batch.logprobs), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", PAPERS)
def test_in_float32_too(name):
    """What a run computes in."""
    file, paper, changes = PAPERS[name]
    batch = case(1)
    loss, gradient = composed(preset(file, *changes), batch, torch.float32)
    assert loss == pytest.approx(twins.constant(paper(batch, batch.logprobs)), rel=1e-4, abs=1e-6)
    agree(gradient, twins.gradient(lambda logprobs: paper(batch, logprobs), batch.logprobs), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_rloo_on_policy_is_the_gradient_of_the_paper(seed):
    """REINFORCE has no ratio; where the policy has not moved yet, the gradient of the ratio is that of its logarithm."""
    batch = case(seed, on_policy=True)
    _, gradient = composed(preset("rloo"), batch)
    agree(gradient, twins.gradient(lambda logprobs: rloo(batch, logprobs), batch.logprobs), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [*PAPERS, "rloo"])
@pytest.mark.parametrize("apart", [0.3, 300.0])
def test_broken_rewards_and_logprobs_leave_a_finite_gradient_and_the_other_tokens_alone(name, apart):
    """NaN and infinity among rewards and log-probabilities, ratios that overflow, and nothing else than usual for the
    rest: a token that drops out does what a token outside the mask does."""
    file, _, changes = PAPERS.get(name, ("rloo", None, ()))
    broken, masked_out = case(7, apart=apart), case(7, apart=apart)
    for number, bad in enumerate((math.nan, math.inf, -math.inf)):
        sample = broken.groups[3][number]
        t = broken.tokens(sample)[0]
        broken.logprobs[sample][t] = bad
        masked_out.masks[sample][t] = 0
    broken.rewards[0] = masked_out.rewards[0] = math.nan
    config = preset(file, *changes)
    if config.kl.place == "reward":  # that penalty is of the old policy: it knows nothing of the new one's tokens
        config = config.model_copy(update={"kl": config.kl.model_copy(update={"coefficient": 0.0})})
    loss, gradient = composed(config, broken)
    expected, other = composed(config, masked_out)
    assert math.isfinite(loss)
    assert loss == pytest.approx(expected, rel=1e-9)
    agree(gradient, other)
    if not config.kl.coefficient:
        assert gradient[0] == [0.0] * len(gradient[0])


@pytest.mark.parametrize("name", [*PAPERS, "rloo"])
def test_a_step_without_a_token_of_the_policy_teaches_nothing(name):
    file, _, changes = PAPERS.get(name, ("rloo", None, ()))
    batch = case(0)
    batch.masks = [[0] * len(mask) for mask in batch.masks]
    loss, gradient = composed(preset(file, *changes), batch)
    assert loss == 0
    assert not any(value for own in gradient for value in own)
