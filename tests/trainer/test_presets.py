"""Every preset's gradient, from rewards to parameters, equals that of its paper's formula over transformers in float64."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from statistics import fmean, pstdev, stdev

import pytest
import torch
from tiny_policy import VOCABULARY, OneRank, gradients, learning, tiny_qwen3

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import RunConfig
from rl_tpu.orchestrator.experience import make_experience
from rl_tpu.types import Group, Prompt, Sample, VersionSpan

MAX_RESPONSE_TOKENS = 24
Term = tuple[list[torch.Tensor], list[float], float]
"""Of one answer: its tokens' log-probabilities, with gradient, those of the sampler, and its advantage."""


def groups_of(seed: int, noise: float) -> list[Group]:
    """Three groups of unequal prompts, four answers each of unequal length; the sampler's log-probabilities are the
    policy's own but for noise, so that ratios lie on both sides of every bound."""
    draw, model = random.Random(seed), tiny_qwen3(True)
    groups = []
    for index in range(3):
        ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))]
        samples = []
        for _ in range(4):
            response = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, MAX_RESPONSE_TOKENS))]
            mask = [int(draw.random() < 0.8) for _ in response]
            mask[0] = 1
            sample = Sample(ids, response, mask, [0.0] * len(response), [VersionSpan(0, 0, len(response))], "stop")
            sample.reward = draw.choice([0.0, 0.5, 1.0]) + draw.random() / 10
            with torch.no_grad():
                exact = response_logprobs(model, sample)
            sample.logprobs = [float(value) + draw.gauss(0, noise) for value in exact]
            samples.append(sample)
        groups.append(Group(index, Prompt(str(index), tuple(ids), None), samples))
    return groups


def response_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    table = torch.log_softmax(model(ids).logits[0], -1)
    first = len(sample.prompt_ids)
    return table[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]


def clipped(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def token_mean_clip(terms: list[Term], low: float, high: float) -> torch.Tensor:
    count = sum(len(new) for new, _, _ in terms)
    return (
        -sum(clipped((n - o).exp(), a, low, high) for new, old, a in terms for n, o in zip(new, old, strict=True))
        / count
    )


def constant_length_clip(terms: list[Term]) -> torch.Tensor:
    total = sum(clipped((n - o).exp(), a, 0.2, 0.2) for new, old, a in terms for n, o in zip(new, old, strict=True))
    return -total / (len(terms) * MAX_RESPONSE_TOKENS)


def gspo(terms: list[Term]) -> torch.Tensor:
    ratios = [(sum(n - o for n, o in zip(new, old, strict=True)) / len(new)).exp() for new, old, _ in terms]
    return -sum(clipped(ratio, a, 3e-4, 4e-4) for ratio, (_, _, a) in zip(ratios, terms, strict=True)) / len(terms)


def cispo(terms: list[Term]) -> torch.Tensor:
    count = sum(len(new) for new, _, _ in terms)
    return (
        -sum(
            (n - o).exp().detach().clamp(max=5) * a * n for new, old, a in terms for n, o in zip(new, old, strict=True)
        )
        / count
    )


def by_group_std(groups: list[list[float]], penalties: list[float]) -> list[float]:
    return [(r - fmean(group)) / (stdev(group) + 1e-6) for group in groups for r in group]


def by_group_mean(groups: list[list[float]], penalties: list[float]) -> list[float]:
    return [r - fmean(group) for group in groups for r in group]


def by_the_others(groups: list[list[float]], penalties: list[float]) -> list[float]:
    return [r - fmean(group[:i] + group[i + 1 :]) for group in groups for i, r in enumerate(group)]


def by_batch(groups: list[list[float]], penalties: list[float]) -> list[float]:
    rewards = [r - 0.01 * p for r, p in zip([r for group in groups for r in group], penalties, strict=True)]
    return [(r - fmean(rewards)) / (pstdev(rewards) + 1e-6) for r in rewards]


PRESETS: dict[str, tuple[Callable, Callable]] = {
    "grpo": (by_group_std, lambda terms: token_mean_clip(terms, 0.2, 0.2)),
    "dapo": (by_group_std, lambda terms: token_mean_clip(terms, 0.2, 0.28)),
    "dr_grpo": (by_group_mean, constant_length_clip),
    "gspo": (by_group_std, gspo),
    "cispo": (by_group_std, cispo),
    "rloo": (by_the_others, constant_length_clip),
    "reinforce_pp": (by_batch, lambda terms: token_mean_clip(terms, 0.2, 0.2)),
}


def configured(preset: str, *overrides: str) -> RunConfig:
    return load_config(
        [
            "+experiment=quickstart",
            f"algorithm={preset}",
            f"rollout.max_response_tokens={MAX_RESPONSE_TOKENS}",
            "trainer.row_tokens=[64,128]",
            *overrides,
        ]
    )


@pytest.mark.parametrize("share_prompts", ["false", "true"])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_is_that_of_the_formula(model_dir, preset, share_prompts):
    noise = {"gspo": 1e-3, "cispo": 1.0}.get(preset, 0.3)  # so that some ratios, not all, are out of bounds
    groups = groups_of(seed=list(PRESETS).index(preset), noise=noise)
    rewards = [[sample.reward for sample in group.samples] for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    config = configured(preset, f"trainer.share_prompts={share_prompts}")
    with learning(config, model_dir) as trainer:
        (batch,), _ = asyncio.run(make_experience(groups, config, OneRank(trainer)))
        metrics = trainer.backward(batch)
        ours = gradients(trainer)

    model = copy.deepcopy(tiny_qwen3(True)).double()
    advantage_of, loss_of = PRESETS[preset]
    exact = [response_logprobs(model, sample) for sample in samples]
    kept = [[i for i, inside in enumerate(sample.loss_mask) if inside] for sample in samples]
    distances = [
        sum(sample.logprobs[i] - float(e[i].detach()) for i in k)
        for sample, e, k in zip(samples, exact, kept, strict=True)
    ]
    terms = [
        ([e[i] for i in k], [sample.logprobs[i] for i in k], a)
        for sample, e, k, a in zip(samples, exact, kept, advantage_of(rewards, distances), strict=True)
    ]
    loss = loss_of(terms)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    assert 0 < metrics["clip_fraction"] < 1
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in ours.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(gradient.double(), theirs[name], rtol=0, atol=1e-4 * scale, msg=name)
