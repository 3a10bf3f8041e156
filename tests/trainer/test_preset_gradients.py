"""Every preset's gradient, from rewards to parameters, equals that of its paper's formula over transformers in float64."""

from __future__ import annotations

import asyncio
import copy
import math
import random

import pytest
import torch
from papers import PAPERS, Case, rloo
from tiny_policy import VOCABULARY, OneRank, gradients, learning, response_logprobs, tiny_qwen3

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import RunConfig
from rl_tpu.orchestrator.experience import make_experience
from rl_tpu.types import Group, Prompt, Sample, VersionSpan

MAX_RESPONSE_TOKENS = 24


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
@pytest.mark.parametrize("name", [*PAPERS, "rloo"])
def test_gradient_is_that_of_the_formula(model_dir, name, share_prompts):
    preset, formula, changes = PAPERS.get(name, ("rloo", rloo, ()))
    # So far apart that some ratios, not all, are out of bounds; RLOO's formula knows no ratio.
    noise = {"gspo": 1e-3, "cispo": 1.0, "rloo": 0.0}.get(name, 0.3)
    groups = groups_of(seed=list(PAPERS).index(name) if name in PAPERS else 9, noise=noise)
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples]
    config = configured(preset, f"trainer.share_prompts={share_prompts}", *changes)
    with learning(config, model_dir) as trainer:
        (batch,), _ = asyncio.run(make_experience(groups, config, OneRank(trainer)))
        metrics = trainer.backward(batch)
        ours = gradients(trainer)

    model = copy.deepcopy(tiny_qwen3(True)).double()
    exact = [list(response_logprobs(model, sample)) for sample in samples]
    case = Case(
        groups=[list(range(start, start + 4)) for start in range(0, len(samples), 4)],
        rewards=rewards,
        masks=[sample.loss_mask for sample in samples],
        logprobs=exact,
        old=[sample.logprobs for sample in samples],
        reference=[[float(value.detach()) for value in own] for own in exact],
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    loss = formula(case, exact)
    loss.backward()
    if name != "rloo":  # whose loss is another function of the same gradient
        assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
        assert 0 < metrics["clip_fraction"] < 1
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in ours.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(gradient.double(), theirs[name], rtol=0, atol=1e-4 * scale, msg=name)


def test_a_logprob_that_is_no_number_costs_its_sample_no_distance(model_dir):
    def distances(broken: float | None) -> list[float]:
        groups = groups_of(seed=3, noise=0.3)
        if broken is not None:
            groups[0].samples[1].logprobs[0] = broken
        asyncio.run(make_experience(groups, config, OneRank(trainer)))
        return [sample.reward_parts["kl"] for group in groups for sample in group.samples]

    config = configured("reinforce_pp", "algorithm.kl.estimator=k3")
    with learning(config, model_dir) as trainer:
        whole, without = distances(None), distances(math.nan)
        assert distances(-math.inf) == without
    assert without[:1] + without[2:] == whole[:1] + whole[2:]
    assert whole[1] < without[1] <= 0
