"""Generating without training, training without engines, and both together beside a whole run."""

from __future__ import annotations

import json
import shutil

import pytest
from jobs import read_rows

from rl_tpu.config.compose import load_config
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.replay import find_steps, read_groups

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
    [group] = read_groups(find_steps(config(dump))[1])
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert group.prompt.id == "p"


def test_a_dump_that_does_not_fit_is_refused_before_anything_starts(dump):
    with pytest.raises(UserError, match=r"replay=.*there is no .*step-000000.jsonl; name a run directory"):
        find_steps(config(dump.parent / "elsewhere"))
    text = (dump / "step-000001.jsonl").read_text()
    (dump / "step-000001.jsonl").write_text(text + text)
    with pytest.raises(UserError, match=r"step-000001.jsonl has 4 samples, .*samples_per_prompt 2 are 2"):
        find_steps(config(dump))
    shutil.move(dump / "step-000001.jsonl", dump / "step-000003.jsonl")
    with pytest.raises(UserError, match=r"step 1 is missing, the next one there is step-000003.jsonl"):
        find_steps(config(dump))


def test_a_row_that_is_no_sample_is_named(dump):
    (dump / "step-000001.jsonl").write_text('{"group": 0}\n{"group"')
    files = find_steps(config(dump))
    with pytest.raises(RunError, match=r"step-000001.jsonl, line 1 is no sample \(KeyError: 'prompt_id'\)"):
        read_groups(files[1])
