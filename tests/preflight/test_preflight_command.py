"""`python -m rl_tpu.preflight` as a user calls it. What the compiler would say is given; the rest is real."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from compiled import GIB, compiled
from PIL import Image
from tiny_qwen3 import tiny_config

from rl_tpu.config.compose import load_config
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.preflight.command import run_preflight
from rl_tpu.orchestrator.preflight.topology import generation_of, topology_of
from rl_tpu.tpu import programs


class Compiler:
    """Stands in for `compile_programs`: backward needs what `answer` says of the configuration; notes what it was asked."""

    def __init__(self):
        self.asked, self.answer = [], lambda config: 30 * GIB

    def __call__(self, config, model_dir, *, topology, progress):
        self.asked.append((topology, model_dir.name))
        progress("compiling backward")
        return [compiled("backward", self.answer(config)), compiled("update", GIB)]


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(programs, "compile_programs", compiler)
    return compiler


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def small(run_dir) -> list[str]:
    """An experiment for a TPU, with a model that is quickly counted."""
    return ["+experiment=qwen3_4b_dapo", "model.path=/not/here/Qwen3-0.6B", f"run_dir={run_dir}"]


def test_what_fits_is_reported_on_the_console_in_json_and_as_a_chart(compiler, run_dir, capsys):
    findings = run_preflight(small(run_dir))
    assert findings.memory.fits
    assert compiler.asked == [("TPU7x:2x2x1", "Qwen3-0.6B")]
    output = capsys.readouterr().out
    for words in (
        "bundled",
        "compiling backward",
        "backward 4x22528",
        "samples of the full 22,528 tokens",
        "fits",
    ):
        assert words in output
    report = json.loads((run_dir / "preflight.json").read_text())
    assert report["model"] == {
        "path": "/not/here/Qwen3-0.6B",
        "config": str(findings.model.directory / "config.json"),
        "bundled": True,
        "parameters": 596_049_920,
    }
    assert [program["name"] for program in report["programs"]] == ["backward", "update"]
    assert report["memory"]["trainer"][0]["peak"] == 30 * GIB + findings.sizes.moments
    assert [check["status"] for check in report["environment"] if check["name"] == "collective"] == ["skipped"]
    assert report["advice"] == []
    image = Image.open(run_dir / "memory.png")
    assert image.width > 600
    assert len(image.convert("RGB").getcolors(2**24)) > 10


def test_what_does_not_fit_is_answered_with_the_setting_that_mends_it(compiler, run_dir, capsys):
    compiler.answer = lambda config: 30 * GIB if config.trainer.kernels.attention == "splash" else None
    findings = run_preflight([*small(run_dir), "trainer.kernels.attention=plain"])
    assert not findings.fits
    (advice,) = json.loads((run_dir / "preflight.json").read_text())["advice"]
    assert advice["overrides"] == ["trainer.kernels.attention=splash"]
    assert advice["fits"]
    output = capsys.readouterr().out
    assert "backward 4x22528 does not compile: CompileTimeHbmOom: 107.64G exceeds 94.74G" in output
    assert (
        "with trainer.kernels.attention=splash: backward 4x22528 needs 31.11 GiB of 94.00 GiB: then it fits" in output
    )
    assert output.splitlines()[-2] == "not ready"


def test_programs_that_were_left_out_leave_the_verdict_open(compiler, run_dir):
    findings = run_preflight([*small(run_dir), "preflight.only=[update]", "algorithm.kl.coefficient=0.1"])
    assert findings.left_out == ("backward", "reference")
    assert not findings.fits


def test_a_cpu_run_is_checked_with_its_ranks_by_the_command(tmp_path):
    model = tmp_path / "model"
    tiny_config(320, tied=True, architectures=["Qwen3ForCausalLM"]).save_pretrained(model)
    command = [sys.executable, "-m", "rl_tpu.preflight", "+experiment=quickstart", f"model.path={model}"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank(s) on 1 host(s)" in done.stdout
    report = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert report["fits"]
    assert {check["name"]: check["status"] for check in report["environment"]}["collective"] == "ok"


def test_bad_command_lines_end_with_2_and_one_line(tmp_path):
    command = [sys.executable, "-m", "rl_tpu.preflight", "+experiment=qwen3_4b_dapo", "preflight.topolgy=v6e:2x2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert "did you mean 'preflight.topology'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["-m"], "takes one configuration and no -m"),
        (["model.path=/not/here/Gemma"], "no config.json"),
        (["preflight.topology=v99:2x2"], "preflight.topology='v99:2x2': 'v99' is unknown"),
        (["preflight.topology=TPU7x"], "is no GENERATION:SHAPE"),
        (["preflight.only=[backwards]"], "preflight.only"),
    ],
)
def test_bad_input_is_found_before_anything_is_compiled(compiler, run_dir, overrides, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        run_preflight([*small(run_dir), *overrides])
    assert compiler.asked == []
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("overrides", "topology"),
    [
        ([], "TPU7x:2x2x1"),
        (["cluster=v7x_two_hosts", "weight_sync=disk", "rollout.engines=4"], "TPU7x:2x2x1"),  # one of them trains
        (
            [
                "cluster=v7x_two_hosts",
                "cluster.hosts=4",
                "cluster.trainer_chips=8",
                "weight_sync=disk",
                "rollout.engines=4",
            ],
            "TPU7x:2x2x2",
        ),
        (["cluster=v6e_8"], "v6e:2x4"),
        (["cluster=v5p_host", "rollout.tensor_parallel=1"], "v5p:2x2x1"),
        (["preflight.topology=v5p:2x2x4"], "v5p:2x2x4"),
    ],
)
def test_the_slice_is_that_of_the_trainers_hosts(overrides, topology):
    config = load_config(["+experiment=qwen3_4b_dapo", *overrides])
    assert topology_of(config) == topology
    assert topology.startswith(generation_of(config).libtpu_name)
