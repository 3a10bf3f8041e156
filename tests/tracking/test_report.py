import json
import subprocess
from importlib import metadata
from pathlib import Path

import yaml
from rich.console import Console

from rl_tpu.tracking import RunDirectory, Tracker, sweep_summary, versions
from rl_tpu.tracking.report import before_after_table, compare_evaluations
from rl_tpu.tracking.versions import package_versions


def text(table):
    """The cells of every line of a printed table."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    lines = [line.replace("┃", "│").strip("│ ") for line in capture.get().splitlines()]
    return [[cell.strip() for cell in line.split("│")] for line in lines]


def test_before_and_after_take_the_first_and_the_last_evaluation():
    comparison = compare_evaluations(
        [
            {"step": 0, "version": 0, "eval/sums/pass@1": 0.25, "eval/sums/length": 20.0, "eval/old/pass@1": 0.1},
            {"step": 2, "version": 2, "eval/sums/pass@1": 0.9},
            {"step": 4, "version": 4, "eval/sums/pass@1": 0.5, "eval/sums/length": 12.0, "eval/a/b/pass@1": None},
        ]
    )
    assert comparison == {
        "sums": {
            "pass@1": {"before": 0.25, "after": 0.5, "change": 0.25},
            "length": {"before": 20.0, "after": 12.0, "change": -8.0},
        },
        "old": {"pass@1": {"before": 0.1, "after": None, "change": None}},
        "a/b": {"pass@1": {"before": None, "after": None, "change": None}},
    }
    lines = text(before_after_table(comparison))
    assert ["sums", "pass@1", "0.25", "0.5", "+0.25"] in lines
    assert ["sums", "length", "20", "12", "-8"] in lines
    assert ["old", "pass@1", "0.1", "–", "–"] in lines
    assert compare_evaluations([]) == {}


def test_a_sweep_is_compared_by_what_differs_between_its_runs(config, tmp_path, without_curves):
    for name, rate, final in (("0", 1e-5, 0.5), ("1", 1e-4, 0.75)):
        changed = yaml.safe_load(yaml.safe_dump(config().model_dump(mode="json")))
        changed["trainer"]["optimizer"]["learning_rate"] = rate
        changed["run_dir"] = str(tmp_path / name)
        with Tracker.open(type(config()).model_validate(changed), tmp_path / name, total_steps=1) as tracker:
            tracker.evaluation(0, 0, {"sums": {"pass@1": 0.25}})
            with tracker.timer("step"):
                pass
            tracker.log(0, {"reward/mean": final})
            tracker.evaluation(1, 1, {"sums": {"pass@1": final}})
    (tmp_path / "2").mkdir()  # a run that was killed before it wrote anything
    (tmp_path / "3").mkdir()
    (tmp_path / "3/summary.json").write_text("{half")

    table = sweep_summary([tmp_path / str(i) for i in range(4)], tmp_path / "sweep_summary.json")
    lines = text(table)
    header = ["run", "trainer.optimizer.learning_rate", "status", "reward", "sums pass@1", "hours"]
    assert header in lines
    assert [line[:5] for line in lines if line[0] in "0123" and line[0]] == [
        ["0", "1e-05", "finished", "0.5", "0.25 → 0.5"],
        ["1", "0.0001", "finished", "0.75", "0.25 → 0.75"],
        ["2", "", "no summary", "–", "– → –"],
        ["3", "", "no summary", "–", "– → –"],
    ]
    written = json.loads((tmp_path / "sweep_summary.json").read_text())["runs"]
    assert written[1]["settings"] == {"trainer.optimizer.learning_rate": 1e-4}
    assert written[1]["evaluation"]["sums"]["pass@1"]["change"] == 0.5
    assert written[1]["hours"] > 0


def test_versions_name_what_ran():
    found = package_versions()
    assert {"python", "rl_tpu", "torch", "torchtitan", "ray", "transformers", "hydra-core", "sglang"} <= set(found)
    assert found["torch"] == metadata.version("torch")
    assert found["rl_tpu"].startswith(metadata.version("rl_tpu"))


def test_the_commit_is_that_of_a_checkout_of_this_package_only(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    assert "(" not in package_versions()["rl_tpu"]  # no checkout
    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD")[:12]
    assert package_versions()["rl_tpu"].endswith(f"({commit})")
    (tmp_path / "file").write_text("2")
    assert package_versions()["rl_tpu"].endswith(f"({commit}+changes)")
    monkeypatch.setattr(versions, "_ROOT", tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()
    assert "(" not in package_versions()["rl_tpu"]  # installed inside somebody else's checkout


def test_a_directory_that_holds_a_run_is_recognised(open_tracker, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    assert not directory.holds_a_run
    with open_tracker() as tracker:
        tracker.log(0, {})
    assert directory.holds_a_run
    assert yaml.safe_load(directory.config.read_text())["name"] == "small"


def test_the_layout_in_the_docstring_is_the_layout():
    directory = RunDirectory(Path("run"))
    properties = [name for name, value in vars(RunDirectory).items() if isinstance(value, property)]
    paths = [value for name in properties if isinstance(value := getattr(directory, name), Path)]
    names = [path.name for path in paths] + ["samples/step-000012.jsonl"]
    assert len(names) > 10
    assert [name for name in names if f"``{name}" not in RunDirectory.__doc__] == []
    assert directory.step_samples(12) == Path("run/samples/step-000012.jsonl")


def test_finish_twice_is_once(open_tracker, tmp_path):
    with open_tracker() as tracker:
        tracker.finish({"first": True})
        assert tracker.finish({"first": False}) == {}
    assert json.loads((tmp_path / "run/summary.json").read_text())["first"] is True
