"""A job that uses most of what the algorithms offer at once, on the real engine and trainer."""

from __future__ import annotations

import pytest
from jobs import read_rows


def test_reference_recomputed_logprobs_correction_passes_and_truncated_sampling(start_job, tmp_path):
    run_dir = tmp_path / "run"
    job = start_job(
        f"run_dir={run_dir}",
        "algorithm=reinforce_pp",
        "algorithm.kl.refresh_steps=1",
        "algorithm.old_logprobs=recompute",
        "algorithm.correction={mode: truncate, level: token, veto: 1.0e-4, normalise: true}",
        "algorithm.minibatches=2",
        "algorithm.epochs=2",
        "algorithm.entropy_coefficient=0.001",
        "algorithm.overlong_buffer_tokens=8",
        "rollout.temperature=0.8",
        "rollout.top_p=0.95",
        "rollout.top_k=40",
        "trainer.share_prompts=true",
    )
    code, output = job.finish()
    assert code == 0, output
    first, second = read_rows(run_dir)
    for row in (first, second):
        assert row["train/updates"] == 4
        assert row["train/logprob_diff_max"] < 1e-3, "the trainer's distribution is the one that was sampled from"
        assert row["train/mismatch_k3"] < 1e-6
        assert row["train/effective_sample_size_tokens"] == pytest.approx(1, abs=1e-4)
        assert row["train/correction_weight_mean"] == pytest.approx(1, abs=1e-3)
        assert row["reward/overlong_mean"] <= 0
    assert abs(first["reward/kl_mean"]) < 1e-5, "before the first update the policy is its reference"
    assert abs(second["reward/kl_mean"]) < 1e-5, "and after every step, as it is refreshed"


def test_the_reference_is_the_first_policy_also_after_a_resume(start_job, tmp_path):
    run_dir = tmp_path / "run"
    options = (
        f"run_dir={run_dir}",
        "algorithm.kl.coefficient=0.01",
        "algorithm.entropy_coefficient=0.1",  # moves the policy whatever its answers are worth
        "trainer.optimizer={learning_rate: 1.0e-3, warmup_steps: 0}",
    )
    code, output = start_job(*options, "trainer.steps=1").finish()
    assert code == 0, output
    code, output = start_job(*options, "trainer.steps=2", "resume=auto").finish()
    assert code == 0, output
    before, after = (row["train/reference_kl"] for row in read_rows(run_dir))
    assert before < 1e-6
    assert after > 1e-5
