"""Credit of turns beside sums written out, and `advantages` where there is only one turn."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest
import torch

from rl_tpu.algorithms.advantages import EPSILON, advantages
from rl_tpu.algorithms.credit import returns_to_go, turn_advantages
from rl_tpu.trainer.packing import pack, spread_over_turns
from rl_tpu.types import Sample, Turn, VersionSpan

BASELINES = ["group_mean", "leave_one_out", "batch_mean", "none"]
SCALES = ["none", "group_std", "group_std_population", "batch_std"]


def test_a_return_is_what_was_earned_from_the_turn_on():
    # 1 at the end, 0.5 for the first turn, -0.25 for the third
    assert returns_to_go(1 + 0.5 - 0.25, [0.5, 0.0, -0.25]) == [1.25, 0.75, 0.75]
    assert returns_to_go(2.0, [0.0]) == [2.0]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_samples_of_one_turn_get_the_advantages_of_samples(baseline, scale):
    dice = random.Random(0)
    rewards = [[dice.choice([0.0, 1.0, dice.random()]) for _ in range(4)] for _ in range(5)]
    of_turns = turn_advantages([[[reward] for reward in group] for group in rewards], baseline, scale)
    assert [[turn for (turn,) in group] for group in of_turns] == advantages(rewards, baseline, scale)


def test_a_turn_is_compared_with_the_same_turn_of_the_others():
    groups = [[[3.0, 1.0, 1.0], [1.0, 0.0], [2.0]], [[0.0], [0.0]]]
    found = turn_advantages(groups, "group_mean", "group_std")
    first = [3.0, 1.0, 2.0]
    second = [1.0, 0.0]
    expected = [
        [(3 - fmean(first)) / (stdev(first) + EPSILON), (1 - 0.5) / (stdev(second) + EPSILON), 0.0],
        [(1 - fmean(first)) / (stdev(first) + EPSILON), (0 - 0.5) / (stdev(second) + EPSILON)],
        [0.0],
    ]
    assert found[1] == [[0.0], [0.0]]
    for got, wanted in zip(found[0], expected, strict=True):
        assert got == pytest.approx(wanted)
    # Without a baseline of the group the third turn, which no other sample has, keeps what it earned.
    assert turn_advantages(groups, "none", "none") == groups


@pytest.mark.parametrize("share_prompts", [False, True])
def test_tokens_get_the_advantage_of_their_turn(share_prompts):
    """Beside a walk over every sample: token by token, the environment's left out."""
    dice = random.Random(1)
    samples = []
    for _ in range(4):
        prompt = [dice.randrange(100) for _ in range(dice.randrange(2, 9))]
        for _ in range(3):
            turns, mask, place = [], [], 0
            for _ in range(dice.randrange(1, 4)):
                written, said = dice.randrange(1, 6), dice.randrange(0, 4)
                turns.append(Turn(place, place + written, advantage=dice.uniform(-2, 2)))
                mask += [1] * written + [0] * said
                place += written + said
            ids = [dice.randrange(100) for _ in mask]
            samples.append(
                Sample(prompt, ids, mask, [-1.0] * len(ids), [VersionSpan(0, 0, len(ids))], "stop", turns=turns)
            )
    batch = pack(samples, [64, 128], share_prompts=share_prompts)
    found = spread_over_turns(samples, batch)
    assert torch.equal(found[batch.loss_mask == 0], torch.zeros(int((batch.loss_mask == 0).sum())))
    seen = 0
    for row, column in batch.loss_mask.nonzero().tolist():
        sample = samples[batch.sample_ids[row, column] - 1]
        token = int(batch.positions[row, column]) + 1 - len(sample.prompt_ids)
        [turn] = [turn for turn in sample.turns if turn.start <= token < turn.end]
        assert math.isclose(found[row, column], turn.advantage, rel_tol=1e-6)
        seen += 1
    assert seen == sum(sum(sample.loss_mask) for sample in samples)


def test_a_batch_without_a_written_token():
    sample = Sample([1, 2], [], [], [], [VersionSpan(0, 0, 0)], "error", turns=[Turn(0, 0, advantage=1.0)])
    batch = pack([sample], [16])
    assert not spread_over_turns([sample], batch).any()
