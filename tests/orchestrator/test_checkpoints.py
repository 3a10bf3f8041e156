"""Which checkpoints of a run are kept, and which a configuration can continue."""

import asyncio
from pathlib import Path

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.job import check_pacing
from rl_tpu.orchestrator.state import Checkpoints, load_state
from rl_tpu.types import Group, Prompt, Sample, VersionSpan

GROUP = Group(7, Prompt("p", (1,), "2"), [Sample([1], [2], [1], [-0.5], [VersionSpan(3, 0, 1)], "stop")])


def collector_state(consumed=0):
    stream = {"epoch": 0, "position": consumed}
    return {"stream": stream, "consumed": consumed, "next_index": 8, "ready": [GROUP], "in_flight": [(8, GROUP.prompt)]}


def save(checkpoints: Checkpoints, *steps: int) -> list[str]:
    for step in steps:
        begin(checkpoints, step)
        assert settle(checkpoints, True) == step
    return [path.name for path in checkpoints.whole()]


def begin(checkpoints: Checkpoints, step: int) -> None:
    async def save_trainer(directory: Path) -> None:
        directory.mkdir()

    asyncio.run(checkpoints.begin(step, {"collector": collector_state()}, save_trainer))


def settle(checkpoints: Checkpoints, answer: bool | Exception) -> int | None:
    async def saved() -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asyncio.run(checkpoints.settle(saved))


def test_the_newest_are_kept(tmp_path):
    assert save(Checkpoints(tmp_path, keep=2), 10, 20, 30) == ["step-000020", "step-000030"]


def test_a_run_that_went_back_replaces_the_later_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 20)
    assert save(checkpoints, 15) == ["step-000010", "step-000015"]
    assert checkpoints.newest().name == "step-000015"


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    (tmp_path / ".step-000005.partial").mkdir()
    save(Checkpoints(tmp_path, keep=2), 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_a_checkpoint_has_its_name_only_once_the_trainers_part_is_on_disk(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    begin(checkpoints, 20)
    assert settle(checkpoints, False) is None
    assert [path.name for path in Checkpoints(tmp_path, keep=1).whole()] == ["step-000010"]
    assert settle(checkpoints, True) == 20
    assert settle(checkpoints, True) is None, "nothing was begun"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_a_checkpoint_that_could_not_be_written_never_looks_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10)
    begin(checkpoints, 20)
    with pytest.raises(RunError, match="no space left"):
        settle(checkpoints, RunError("no space left"))
    assert settle(checkpoints, True) is None
    assert checkpoints.newest().name == "step-000010"
    assert save(checkpoints, 30) == ["step-000010", "step-000030"]


def test_groups_and_prompts_come_back_as_they_were(tmp_path):
    save(Checkpoints(tmp_path, keep=1), 5)
    state = load_state(tmp_path / "step-000005", [GROUP.prompt])
    assert state["collector"] == collector_state()
    with pytest.raises(UserError, match="prompt 'p', which is not among"):
        load_state(tmp_path / "step-000005", [Prompt("q", (1,), "2")])


@pytest.mark.parametrize(
    ("override", "words"),
    [("rollout.prompts_per_step=8", "prompts_per_step 8"), ("rollout.max_staleness=0", "1 policy versions old")],
)
def test_another_pacing_cannot_continue(override, words):
    state = {"step": 4, "collector": collector_state(consumed=4 * 16)}
    check_pacing(load_config(["+experiment=quickstart", "rollout.max_staleness=1"]), state)
    check_pacing(load_config(["+experiment=quickstart", "rollout.stale_groups=drop"]), state)
    with pytest.raises(UserError, match=words):
        check_pacing(load_config(["+experiment=quickstart", "rollout.max_staleness=1", override]), state)
