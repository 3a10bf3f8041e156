"""Every preset, from rewards to the gradient of every log-probability, against the formula of its paper.

The formulas stand here as the papers print them, over samples and tokens as plain Python numbers, for a batch of uneven
groups (one of a single sample, one of equal rewards) and uneven answers (one empty, one without a token of the policy).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import twins
import yaml
from batches import Rows, agree

from rl_tpu.algorithms.advantages import advantages
from rl_tpu.algorithms.aggregation import token_weights
from rl_tpu.algorithms.kl import kl
from rl_tpu.algorithms.masked import masked, usable_tokens
from rl_tpu.algorithms.objectives import Bounds, find_objective
from rl_tpu.algorithms.overlong import soft_overlong_penalty
from rl_tpu.algorithms.ratios import log_ratio
from rl_tpu.config.schema import AlgorithmConfig

MAX_RESPONSE_TOKENS = 9
PRESETS = Path(__file__).parents[2] / "configs" / "algorithm"
exp = twins.exp


@dataclass
class Case:
    """A batch; `groups` name the samples of each prompt."""

    groups: list[list[int]]
    rewards: list[float]
    masks: list[list[int]]
    logprobs: list[list[float]]
    old: list[list[float]]
    reference: list[list[float]]

    def tokens(self, sample: int) -> list[int]:
        """Where the policy wrote."""
        return [t for t, inside in enumerate(self.masks[sample]) if inside]


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

    return Case(groups, rewards, masks, old if on_policy else near(old), old, near(old))


def composed(config: AlgorithmConfig, case: Case, dtype=torch.float64) -> tuple[float, list[list[float]]]:
    """The loss and its gradient as the parts that `config` names make it, in packed rows."""
    rewards = list(case.rewards)
    rows = Rows([len(mask) for mask in case.masks], seed=3)
    mask, old, reference = (rows.tensor(v, 0, dtype) for v in (case.masks, case.old, case.reference))
    if config.kl.place == "reward":
        distances = rows.samples(masked(kl(old, reference, config.kl.estimator), mask))
        rewards = [r - config.kl.coefficient * math.fsum(own) for r, own in zip(rewards, distances, strict=True)]
    buffer = min(config.overlong_buffer_tokens, 4)
    rewards = [
        reward + soft_overlong_penalty(len(own), MAX_RESPONSE_TOKENS, buffer, config.overlong_penalty)
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


# --------------------------------------------------------------------------------- the papers' objectives, as losses


def group_normalised(case: Case, rewards: list[float]) -> dict[int, float]:
    found = {}
    for group in case.groups:
        own = [rewards[i] for i in group]
        for i in group:
            uniform = len(set(own)) == 1
            found[i] = 0.0 if uniform else (rewards[i] - twins.mean(own)) / (twins.deviation(own, 1) + 1e-6)
    return found


def surrogate(ratio, advantage: float, low: float, high: float):
    """min(ratio A, clip(ratio, 1 - low, 1 + high) A)."""
    held = twins.bounded(ratio, 1 - low, 1 + high) * advantage
    plain = ratio * advantage
    return held if held < plain else plain


def grpo(case: Case, logprobs: list[list]):
    """arXiv 2402.03300, eq. 3 and 4: the mean over answers of the mean over their tokens, beta times KL in the loss."""
    advantage, terms = group_normalised(case, case.rewards), []
    for i in range(len(case.rewards)):
        own = 0.0
        for t in case.tokens(i):
            ratio = exp(logprobs[i][t] - case.old[i][t])
            gap = case.reference[i][t] - logprobs[i][t]
            own += surrogate(ratio, advantage[i], 0.2, 0.2) - 0.04 * (exp(gap) - gap - 1)
        if case.tokens(i):
            terms.append(own / len(case.tokens(i)))
    return -sum(terms) / len(terms)


def token_mean(case: Case, logprobs: list[list], advantage: dict[int, float], low: float, high: float):
    total, count = 0.0, 0
    for i in range(len(case.rewards)):
        for t in case.tokens(i):
            total += surrogate(exp(logprobs[i][t] - case.old[i][t]), advantage[i], low, high)
            count += 1
    return -total / count


def grpo_of_today(case: Case, logprobs: list[list]):
    return token_mean(case, logprobs, group_normalised(case, case.rewards), 0.2, 0.2)


def dapo(case: Case, logprobs: list[list]):
    """arXiv 2503.14476, eq. 8 and 13: 1 / all tokens, clip 0.2 and 0.28, rewards less a soft overlong penalty."""
    rewards = []
    for i, own in enumerate(case.masks):
        free = MAX_RESPONSE_TOKENS - 4
        penalty = 0 if len(own) <= free else (free - len(own)) / 4
        rewards.append(case.rewards[i] + penalty)
    return token_mean(case, logprobs, group_normalised(case, rewards), 0.2, 0.28)


def dr_grpo(case: Case, logprobs: list[list]):
    """arXiv 2503.20783, section 3.2: neither the group's deviation nor the answer's length divides anything."""
    total = 0.0
    for group in case.groups:
        for i in group:
            advantage = case.rewards[i] - twins.mean([case.rewards[j] for j in group])
            for t in case.tokens(i):
                ratio = exp(logprobs[i][t] - case.old[i][t])
                total += surrogate(ratio, advantage, 0.2, 0.2) / MAX_RESPONSE_TOKENS
    return -total / len(case.rewards)


def gspo(case: Case, logprobs: list[list]):
    """arXiv 2507.18071, eq. 5 and 7: one ratio for an answer, the geometric mean over its tokens."""
    advantage, terms = group_normalised(case, case.rewards), []
    for i in range(len(case.rewards)):
        if tokens := case.tokens(i):
            ratio = exp(sum(logprobs[i][t] - case.old[i][t] for t in tokens) / len(tokens))
            terms.append(surrogate(ratio, advantage[i], 3e-4, 4e-4))
    return -sum(terms) / len(terms)


def cispo(case: Case, logprobs: list[list]):
    """arXiv 2506.13585, eq. 4 and 5: the ratio, bounded above and without gradient, weighs the log-probability."""
    advantage, total, count = group_normalised(case, case.rewards), 0.0, 0
    for i in range(len(case.rewards)):
        for t in case.tokens(i):
            weight = min(math.exp(twins.constant(logprobs[i][t]) - case.old[i][t]), 1 + 4.0)
            total += weight * advantage[i] * logprobs[i][t]
            count += 1
    return -total / count


def rloo(case: Case, logprobs: list[list]):
    """arXiv 2402.14740: reward minus the mean of the other answers, times the log-probability of the whole answer. The
    constant number of tokens is ours."""
    total = 0.0
    for group in case.groups:
        for i in group:
            others = [case.rewards[j] for j in group if j != i]
            advantage = case.rewards[i] - twins.mean(others) if others else 0.0
            total += advantage * sum(logprobs[i][t] for t in case.tokens(i))
    return -total / len(case.rewards) / MAX_RESPONSE_TOKENS


def reinforce_pp(case: Case, logprobs: list[list]):
    """arXiv 2501.03262: rewards less the divergence from the reference, normalised over the whole batch; PPO's clip."""
    shaped = [
        reward - 0.01 * sum(case.old[i][t] - case.reference[i][t] for t in case.tokens(i))
        for i, reward in enumerate(case.rewards)
    ]
    middle, spread = twins.mean(shaped), twins.deviation(shaped, 0)
    advantage = {i: (reward - middle) / (spread + 1e-6) for i, reward in enumerate(shaped)}
    return token_mean(case, logprobs, advantage, 0.2, 0.2)


PAPERS: dict[str, tuple[str, Callable, dict]] = {
    "grpo": ("grpo", grpo_of_today, {}),
    "grpo as published": ("grpo", grpo, {"aggregation": "sample_mean", "kl": {"coefficient": 0.04}}),
    "dapo": ("dapo", dapo, {}),
    "dr_grpo": ("dr_grpo", dr_grpo, {}),
    "gspo": ("gspo", gspo, {}),
    "cispo": ("cispo", cispo, {}),
    "reinforce_pp": ("reinforce_pp", reinforce_pp, {}),
}


def preset(name: str, **changes) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) | changes)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_paper(name, seed):
    file, paper, changes = PAPERS[name]
    batch = case(seed)
    loss, gradient = composed(preset(file, **changes), batch)
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
    loss, gradient = composed(preset(file, **changes), batch, torch.float32)
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
    file, _, changes = PAPERS.get(name, ("rloo", None, {}))
    broken, masked_out = case(7, apart=apart), case(7, apart=apart)
    for number, bad in enumerate((math.nan, math.inf, -math.inf)):
        sample = broken.groups[3][number]
        t = broken.tokens(sample)[0]
        broken.logprobs[sample][t] = bad
        masked_out.masks[sample][t] = 0
    broken.rewards[0] = masked_out.rewards[0] = math.nan
    config = preset(file, **changes)
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
    file, _, changes = PAPERS.get(name, ("rloo", None, {}))
    batch = case(0)
    batch.masks = [[0] * len(mask) for mask in batch.masks]
    loss, gradient = composed(preset(file, **changes), batch)
    assert loss == 0
    assert not any(value for own in gradient for value in own)
