"""Generating without training, training without engines, and both together beside a whole run."""

from __future__ import annotations

import asyncio
import json
import math
import shutil

import pytest
from jobs import read_rows

from rl_tpu.config.compose import load_config
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.replay import Replay, check_steps, read_groups

LEARNT = ("train/loss", "train/grad_norm", "train/entropy", "train/ratio_mean", "reward/mean", "reward/overlong_mean")


SHAPED = ["algorithm.overlong_buffer_tokens=20", "trainer.checkpoint.every_steps=1"]


def samples(run_dir, step):
    path = run_dir / "samples" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def finish(job):
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    return output


def assert_learnt_alike(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in LEARNT} == pytest.approx({name: other[name] for name in LEARNT}, rel=1e-5)


def test_a_replay_learns_what_the_run_learnt(start_job, tmp_path):
    """Step by step the same numbers, without an engine; what was added to rewards is not added twice."""
    original, replayed = tmp_path / "original", tmp_path / "replayed"
    finish(start_job(f"run_dir={original}", *SHAPED))
    finish(start_job(f"run_dir={replayed}", *SHAPED, f"replay={original}"))
    assert_learnt_alike(read_rows(replayed), read_rows(original))
    assert not list(replayed.glob("logs/engine-*"))
    weights = [(run_dir / "final" / "model.safetensors").read_bytes() for run_dir in (original, replayed)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_answers_are_generated_apart_and_a_replay_is_resumed(start_job, tmp_path):
    original, replayed, generated = (tmp_path / name for name in ("original", "replayed", "generated"))
    finish(start_job(f"run_dir={original}", *SHAPED, "trainer.steps=3"))
    finish(start_job(f"run_dir={replayed}", *SHAPED, f"replay={original}", "trainer.steps=2"))
    further = ["trainer.steps=4", "resume=auto"]
    output = finish(start_job(f"run_dir={replayed}", *SHAPED, f"replay={original}", *further))
    assert f"after step 3 the prompts are used up: replay={original}" in output
    assert_learnt_alike(read_rows(replayed), read_rows(original))

    # What the model writes before its first update is drawn and numbered alike; rounding may change a token.
    finish(start_job(f"run_dir={generated}", module="rl_tpu.generate"))
    pairs = list(zip(samples(generated, 0), samples(original, 0), strict=True))
    assert [(mine["id"], mine["prompt_id"]) for mine, _ in pairs] == [(s["id"], s["prompt_id"]) for _, s in pairs]
    equal = [(mine, other) for mine, other in pairs if mine["response_ids"] == other["response_ids"]]
    assert len(equal) > 0.9 * len(pairs)
    for mine, other in equal:
        assert mine["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
    assert {span["version"] for sample in samples(generated, 1) for span in sample["spans"]} == {0}
    assert [sample["prompt_id"] for sample in samples(generated, 1)] == [s["prompt_id"] for s in samples(original, 1)]
    assert all(row["perf/tokens_per_s"] > 0 for row in read_rows(generated))


@pytest.fixture
def dump(tmp_path):
    """Two steps of one prompt with two samples."""
    row = {
        "group": 0,
        "prompt_id": "p",
        "messages": [],
        "answer": "1",
        "response": "1",
        "reward": 0.5,
        "reward_parts": {"exact": 1.0, "overlong": -0.5},
        "reward_error": None,
        "finish_reason": "stop",
        "spans": [{"version": 0, "start": 0, "end": 1}],
        "prompt_ids": [1],
        "response_ids": [2],
        "loss_mask": [1],
        "logprobs": [-0.1],
    }
    directory = tmp_path / "dump" / "samples"
    directory.mkdir(parents=True)
    for step in range(2):
        (directory / f"step-{step:06d}.jsonl").write_text((json.dumps(row) + "\n") * 2)
    return directory


def config(directory):
    sizes = ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"]
    return load_config(["+experiment=quickstart", f"replay={directory.parent}", *sizes])


def test_what_the_algorithm_added_to_rewards_is_left_out(dump):
    [group] = read_groups(check_steps(config(dump), dump.parent / "new")[1])
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert group.prompt.id == "p"


def test_numbers_that_json_cannot_hold_are_not_numbers(dump):
    path = dump / "step-000000.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text((json.dumps({**row, "logprobs": [None], "reward_parts": {"exact": None}}) + "\n") * 2)
    [group] = read_groups(path)
    assert all(math.isnan(sample.logprobs[0]) and math.isnan(sample.reward) for sample in group.samples)


def test_samples_of_another_model_are_refused(dump):
    files = check_steps(config(dump), dump.parent / "new")
    [group] = read_groups(files[0])
    largest = max(*group.prompt.ids, *group.samples[0].response_ids)
    assert len(asyncio.run(Replay(config(dump), files, largest + 1).batch(0))) == 1
    with pytest.raises(UserError, match=rf"step-000000.jsonl has the token id {largest}, the model's vocabulary has"):
        asyncio.run(Replay(config(dump), files, largest).batch(0))


def test_a_dump_that_does_not_fit_is_refused_before_anything_starts(dump):
    with pytest.raises(UserError, match=r"replay=.*there is no .*step-000000.jsonl; name a run directory"):
        check_steps(config(dump.parent / "elsewhere" / "samples"), dump.parent / "new")
    with pytest.raises(UserError, match=r"is the run's own directory, whose samples it would replace: set run_dir"):
        check_steps(config(dump), dump.parent)
    narrow = config(dump)
    narrow = narrow.model_copy(update={"trainer": narrow.trainer.model_copy(update={"row_tokens": [1]})})
    with pytest.raises(UserError, match=r"has a sample of 2 tokens, the longest row of trainer.row_tokens is 1"):
        check_steps(narrow, dump.parent / "new")
    last = dump / "step-000001.jsonl"
    text = last.read_text()
    other = text.replace('"group": 0', '"group": 1')
    for wrong, found in (
        (text + text, "1 groups of 4"),
        (text.splitlines()[0] + "\n" + other.splitlines()[0], "2 groups of 1"),
    ):
        last.write_text(wrong)
        with pytest.raises(
            UserError, match=rf"step-000001.jsonl has {found} samples, .* is 1 and samples_per_prompt 2"
        ):
            check_steps(config(dump), dump.parent / "new")
    last.write_text('{"group": 0}\n{"group"')
    with pytest.raises(UserError, match=r"step-000001.jsonl, line 1 is no sample \(KeyError: 'prompt_id'\)"):
        check_steps(config(dump), dump.parent / "new")
    last.write_bytes('"é'.encode()[:-1])
    with pytest.raises(UserError, match=r"step-000001.jsonl, line 1 is no sample \(UnicodeDecodeError"):
        check_steps(config(dump), dump.parent / "new")
    last.write_text(json.dumps({**json.loads(text.splitlines()[0]), "reward_parts": None}))
    with pytest.raises(UserError, match=r"step-000001.jsonl, line 1 is no sample \(AttributeError"):
        check_steps(config(dump), dump.parent / "new")
    shutil.move(last, dump / "step-000003.jsonl")
    with pytest.raises(UserError, match=r"step 1 is missing, the next one there is step-000003.jsonl"):
        check_steps(config(dump), dump.parent / "new")
