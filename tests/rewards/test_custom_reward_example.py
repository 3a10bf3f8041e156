"""The example reward, by its import path and through the workers."""

import asyncio

import pytest

from rl_tpu.config.schema import RewardConfig
from rl_tpu.rewards import RewardService
from rl_tpu.types import Prompt, Sample


def test_named_parts_add_up():
    texts = ["12", "<answer>12</answer>", " " * 20 + r"\boxed{12}", "11", ""]
    samples = [Sample([1], [1], [1], [0.0], [], "stop", text=text) for text in texts]
    config = RewardConfig(name="examples.custom_reward.concise:score", options={"bonus": 0.5, "free_characters": 20})
    with RewardService(config) as service:
        asyncio.run(service.score(Prompt("p", (1,), 12), samples))
    assert [sample.reward_parts for sample in samples] == [
        {"correct": 1.0, "concise": 0.5},
        {"correct": 1.0, "concise": 0.5},
        {"correct": 1.0, "concise": 0.25},
        {"correct": 0.0, "concise": 0.0},
        {"correct": 0.0, "concise": 0.0},
    ]
    assert [sample.reward for sample in samples] == pytest.approx([1.5, 1.5, 1.25, 0, 0])


def test_novelty_looks_at_the_whole_group():
    samples = [Sample([1], [1], [1], [0.0], [], "stop", text=text) for text in ("a b", "b c d e", "b", "")]
    with RewardService(RewardConfig(name="examples.custom_reward.novelty:score")) as service:
        asyncio.run(service.score(Prompt("p", (1,), None), samples))
    assert [sample.reward for sample in samples] == [0.5, 0.75, 0.0, 0.0]
