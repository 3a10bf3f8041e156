"""`python -m rl_tpu.evaluate`: which directory is meant, a comparison from beginning to end, and what can be got wrong."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import ray

from rl_tpu.errors import UserError
from rl_tpu.orchestrator.evaluate_command import configurations, run_evaluation
from rl_tpu.orchestrator.job import exit_code
from rl_tpu.orchestrator.policy_directory import find_policy

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python -m rl_tpu\.evaluate ((?:[^`\n]*\\\n)*[^`\n]*)")
SETS = [
    "evaluation=chain_sum",
    "evaluation.sets.held_out.source.size=20",
    "evaluation.sets.held_out_greedy.source.size=20",
]


def test_a_policy_compared_with_itself(start_job, tiny_model, tmp_path, capsys):
    """First with an engine for each, then with what the first evaluation left."""
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run" / "final").symlink_to(tiny_model)
    directory = tmp_path / "evaluation"
    sides = [f"checkpoint={tmp_path / 'a_run'}", f"compare={tiny_model}"]
    job = start_job(*sides, f"run_dir={directory}", *SETS, module="rl_tpu.evaluate")
    code, output = job.finish()
    assert code == 0, output
    assert job.left_behind() == []
    report = json.loads((directory / "evaluation.json").read_text())
    other = json.loads((directory / "compared" / "evaluation.json").read_text())
    assert report["model"] == other["model"] == str(tiny_model)
    assert report["settings"] == other["settings"]
    metrics = report["evaluation"]["held_out"]
    assert {"reward_mean", "pass@1", "pass@2", "pass@4", "maj@4", "mean@4", "pass@1_low"} <= metrics.keys()
    assert "pass@2" not in report["evaluation"]["held_out_greedy"]
    for folder, each in ((directory, report), (directory / "compared", other)):
        rows = [json.loads(line) for line in (folder / "samples" / "held_out.jsonl").read_text().splitlines()]
        assert len(rows) == 20 * 4
        scores = each["scores"]["held_out"]
        for prompt in scores:
            rewards = [row["reward"] for row in rows if row["prompt_id"] == prompt]
            assert scores[prompt]["reward_mean"] == pytest.approx(fmean(rewards))
            assert scores[prompt]["pass@1"] == sum(reward >= 1 for reward in rewards) / 4
        assert each["evaluation"]["held_out"]["pass@1"] == pytest.approx(fmean(s["pass@1"] for s in scores.values()))
    for name in ("held_out", "held_out_greedy"):
        compared = report["comparison"]["sets"][name]
        assert compared["verdict"].startswith("no difference at confidence 0.95")
        assert f"{name}: no difference at confidence 0.95" in output
        values = compared["metrics"]["pass@1"]
        ours, theirs = (each["evaluation"][name]["pass@1"] for each in (report, other))
        assert (values["checkpoint"], values["compare"]) == pytest.approx((ours, theirs))
        assert values["difference"] == pytest.approx(ours - theirs)

    fixed = ["+experiment=quickstart", "data.train.size=200", "evaluation=chain_sum", f"checkpoint={tiny_model}"]
    wrong = [f"compare={directory}", f"run_dir={tmp_path / 'again'}", *SETS[:2]]  # as big, but 256 greedy prompts
    code = exit_code(lambda: run_evaluation([*fixed, *wrong]))
    assert (code, capsys.readouterr().err) == (
        2,
        f"error: compare={directory / 'evaluation.json'} cannot be compared: evaluation.sets.held_out_greedy has other"
        " prompts there\n",
    )
    assert not ray.is_initialized()


def test_the_commands_of_the_guides():
    guides = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
    commands = [found[1] for guide in guides for found in COMMAND.finditer(guide.read_text())]
    assert len(commands) >= 3
    for command in commands:
        arguments = shlex.split(command.replace("\\\n", " "), comments=True)
        settings = [
            each for each in arguments if not each.startswith(("checkpoint=", "compare="))
        ]  # there is no such path
        assert configurations(settings)[0].evaluation.sets


def model(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_which_directory_a_path_means(tmp_path):
    policy = model(tmp_path / "policy")
    assert find_policy(str(policy), "checkpoint") == policy
    run = tmp_path / "run"
    older, newer = model(run / "exports" / "step-000010"), model(run / "exports" / "step-000020")
    assert find_policy(str(run), "checkpoint") == newer
    assert find_policy(str(run / "exports"), "checkpoint") == newer
    assert find_policy(str(older), "checkpoint") == older
    final = model(run / "final")
    assert find_policy(str(run), "checkpoint") == final


def test_paths_that_are_no_policy(tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-000010"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    export = f"python -m rl_tpu.export checkpoint={step} out=DIR"
    for value, words in {
        "": "checkpoint= needs a directory",
        str(tmp_path / "nowhere"): "there is no directory",
        str(step): f"is a training checkpoint: write its policy with {export}, and evaluate checkpoint=DIR",
        str(tmp_path / "run"): f"is a run that has neither final/ nor exports/: write one with {export}",
        str(tmp_path): "is no Hugging Face directory (it has no config.json) and no run directory",
    }.items():
        with pytest.raises(UserError) as error:
            find_policy(value, "checkpoint")
        assert words in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint"], "'checkpoint' is not KEY=VALUE"),
        (["checkpoint=a", "checkpoint=b"], "checkpoint is given twice"),
        (["evaluation=none"], "nothing to evaluate"),
        (["compare=nowhere"], "compare=nowhere: there is no directory"),
        (["evaluation.confidence=2"], "evaluation.confidence"),
        (["evaluation.beside_training=true"], "it needs rollout.engines 2 or more, it is 1"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(UserError) as error:
        configurations(["+experiment=quickstart", *arguments])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{half", "cannot be read"),
        ("[]", "is no evaluation.json of this program: it has no model, settings, evaluation, scores"),
        ('{"model": "a", "evaluation": {}}', "it has no settings, scores"),
        (
            '{"model": "", "evaluation": {}, "settings": {"evaluation.sets.s": {"n": 1}}, "scores": {"s": {}}}',
            "is not whole",
        ),
        ('{"model": "", "evaluation": {}, "settings": 3, "scores": 3}', "is not whole"),
    ],
)
def test_a_report_that_cannot_be_compared_with(tiny_model, tmp_path, capsys, text, words):
    path = tmp_path / "evaluation.json"
    if text is not None:
        path.write_text(text)
    arguments = [f"checkpoint={tiny_model}", f"compare={path}", f"run_dir={tmp_path / 'out'}", *SETS]
    assert exit_code(lambda: run_evaluation(["+experiment=quickstart", *arguments])) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: compare={path}")
    assert words in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_evaluation_is_not_overwritten_and_a_broken_model_is_said(tiny_model, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluation.json").write_text("{}")
    arguments = ["+experiment=quickstart", *SETS, f"run_dir={tmp_path / 'out'}"]
    assert exit_code(lambda: run_evaluation([*arguments, f"checkpoint={tiny_model}"])) == 2
    assert "already holds a run or an evaluation" in capsys.readouterr().err
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    arguments[-1] = f"run_dir={tmp_path / 'other'}"
    assert exit_code(lambda: run_evaluation([*arguments, f"checkpoint={tmp_path / 'model'}"])) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "model") in message
    assert message.count("\n") == 1
