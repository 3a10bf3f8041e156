"""Prompts of a run: what a dry run says about them, and a run over a mixture that ends with them."""

from __future__ import annotations

import json

import pytest
from jobs import read_rows

from rl_tpu.config.compose import load_config
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.dry_run import describe
from rl_tpu.orchestrator.inputs import read_inputs


def mixture(tmp_path) -> list[str]:
    """Overrides of the quickstart: sums, and a file of 30 problems of which 10 are in the evaluation set `own`."""
    rows = [json.dumps({"problem": f"What is {n} + 1?", "answer": n + 1}) + "\n" for n in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "test.jsonl").write_text("".join(rows[:10]))
    fields = "kind: file, prompt_field: problem, path"
    return [
        "data.train.kind=mixture",
        "evaluation=none",
        "+data/source@data.train.sources.sums=chain_sum",
        "data.train.sources.sums.size=40",
        f"+data.train.sources.own={{weight: 0.5, {fields}: {tmp_path / 'train.jsonl'}}}",
        f"+evaluation.sets.own.source={{{fields}: {tmp_path / 'test.jsonl'}}}",
    ]


def configured(tmp_path, model, *overrides: str):
    return load_config(["+experiment=quickstart", f"model.path={model}", "model.make=null", *overrides])


def test_a_dry_run_reports_every_source(tiny_model, tmp_path, capsys):
    describe(configured(tmp_path, tiny_model, *mixture(tmp_path)), tmp_path / "run")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "data.train.sources.sums reasoning_gym task 'chain_sum' 40 prompts" in shown
    assert "20 prompts (left out: 10 also in evaluation set own)" in shown
    assert "evaluation.sets.own.source prompt file" in shown
    assert "10 prompts" in shown

    (tmp_path / "test.jsonl").unlink()
    describe(configured(tmp_path, tiny_model, *mixture(tmp_path)[:5]), tmp_path / "run")
    missing = ["data.train.kind=file", f"data.train.path=[{tmp_path}/*.parquet]", "evaluation=none"]
    describe(configured(tmp_path, tiny_model, *missing), tmp_path / "run")
    assert f"not on this machine: data.train: ['{tmp_path}/*.parquet']" in capsys.readouterr().out


def test_too_few_prompts_for_a_step_are_refused(tiny_model, tmp_path):
    config = configured(tmp_path, tiny_model, "data.epochs=2", "data.train.size=7", "rollout.prompts_per_step=16")
    with pytest.raises(UserError, match=r"data.epochs 2 over 7 prompts give 14, fewer than .*prompts_per_step 16"):
        read_inputs(config)


@pytest.mark.slow
def test_a_run_ends_with_its_prompts(start_job, tmp_path):
    run_dir = tmp_path / "run"
    rewards = ["reward.name=null", "+reward.by_source.own.name=math", "+reward.by_source.sums.name=reasoning_gym"]
    settings = [*mixture(tmp_path), *rewards, "data.epochs=1", "trainer.steps=500", f"run_dir={run_dir}"]
    code, output = start_job(*settings).finish()
    assert code == 0, output
    steps = len(read_rows(run_dir))
    assert 1 <= steps <= 60 // load_config(["+experiment=quickstart"]).rollout.prompts_per_step
    assert f"after step {steps} the prompts are used up: data.epochs 1" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (run_dir / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert (run_dir / "final" / "model.safetensors").is_file()
    sources = set()
    for dump in (run_dir / "samples").glob("step-*.jsonl"):
        sources |= {json.loads(line)["prompt_id"].split("/")[0] for line in dump.read_text().splitlines()}
    assert sources == {"sums", "own"}
    code, output = start_job(*settings, "resume=auto").finish()
    assert code == 0, output
    assert f"after step {steps} the prompts are used up" in output
