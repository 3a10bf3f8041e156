"""A run small enough to write down: its configuration, its groups, and a tracker over it."""

import pytest

from rl_tpu.config.schema import RunConfig
from rl_tpu.tracking import Tracker, curves
from rl_tpu.types import Group, Prompt, Sample, VersionSpan


def run_config(**tracking) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": {"path": "policy"},
            "data": {"train": {"kind": "file", "path": "prompts.jsonl"}},
            "reward": {"name": "math"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 4},
            "trainer": {"steps": 4},
            "cluster": {"device": "cpu", "chips_per_host": 2, "trainer_chips": 1, "rollout_chips": 1},
            "tracking": {"tensorboard": False, **tracking},
        }
    )


def make_sample(reward, response=3, prompt=2, versions=((0, 0, 3),), finish="stop", parts=None, error=None) -> Sample:
    return Sample(
        prompt_ids=list(range(prompt)),
        response_ids=list(range(10, 10 + response)),
        loss_mask=[1] * response,
        logprobs=[-0.5] * response,
        spans=[VersionSpan(*span) for span in versions],
        finish_reason=finish,
        text="four",
        reward=reward,
        reward_parts=parts or {},
        reward_error=error,
    )


def make_group(index, samples) -> Group:
    messages = ({"role": "user", "content": "2+2?"},)
    return Group(index, Prompt(f"sums/{index}", (0, 1), "4", messages), samples)


@pytest.fixture
def config():
    """``config(wandb={...})``: a run configuration with these tracking settings (TensorBoard off unless asked for)."""
    return run_config


@pytest.fixture
def sample():
    return make_sample


@pytest.fixture
def group():
    return make_group


@pytest.fixture
def without_curves(monkeypatch):
    """Drawing takes a second or two, which only the tests of the curves need."""
    monkeypatch.setattr(curves, "draw_curves", lambda directory, plot_metrics: directory.curves)


@pytest.fixture
def open_tracker(tmp_path, request):
    """``open_tracker(start_step=0, **tracking)``: a tracker of a run of four steps in ``tmp_path/run``."""
    if "curves" not in request.node.name:
        request.getfixturevalue("without_curves")

    def open_tracker(start_step=0, **tracking) -> Tracker:
        return Tracker.open(run_config(**tracking), tmp_path / "run", total_steps=4, start_step=start_step)

    return open_tracker
