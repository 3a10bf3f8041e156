"""One rank and two ranks of FSDP2 do the same, save and load exactly, and read each other's checkpoints."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_program import exercise
from tiny_policy import make_samples, tiny_qwen3
from transformers import Qwen3ForCausalLM

from rl_tpu.trainer.export import stored_dtypes
from rl_tpu.trainer.packing import pack

COSTS = ("train/tokens_per_s", "train/peak_memory_gb")
PROGRAM = Path(__file__).with_name("ranks_program.py")


def run_ranks(ranks: int, arguments: list[Path | str], logs: Path, program: Path = PROGRAM) -> None:
    """Run the program in as many processes; what they say is in the failure."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(program.parents[1]),  # tiny_qwen3.py
        }
        log = (logs / f"rank-{rank}.log").open("w")
        command = [sys.executable, str(program), *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join((logs / f"rank-{rank}.log").read_text()[-3000:] for rank in range(ranks))


@pytest.fixture(scope="module")
def all_runs(model_dirs, tmp_path_factory) -> Path:
    """OUT_DIR of both models on one rank (in this process) and on two, which also load what the one saved."""
    root = tmp_path_factory.mktemp("ranks")
    torch.save(pack(make_samples(14), [64], 2, 128).tensors(), root / "batch.pt")
    arguments = [root / "batch.pt"]
    for directory in model_dirs.values():
        one, two = root / directory.name / "1", root / directory.name / "2"
        one.mkdir(parents=True)
        exercise(root / "batch.pt", directory, one)
        shutil.copytree(one / "one", two / "other")
        arguments += [directory, two]
    run_ranks(2, arguments, root)
    return root


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def runs(request, all_runs, model_dirs) -> tuple[bool, Path, dict[int, list[dict]]]:
    """Whether embeddings are tied, the directory of the runs with 1 and 2 ranks, and their results by ranks."""
    root = all_runs / model_dirs[request.param].name
    results = {ranks: [torch.load(root / str(ranks) / f"rank-{r}.pt") for r in range(ranks)] for ranks in (1, 2)}
    return request.param, root, results


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], rtol=0, atol=relative * float(theirs[name].abs().max()))
        for name in ours
    )


def without_costs(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in COSTS}


def test_weights_are_read_exactly(runs):
    tied, _, results = runs
    theirs = tiny_qwen3(tied).state_dict()
    if tied:
        theirs.pop("lm_head.weight")
    for ranks in (1, 2):
        assert equal(results[ranks][0]["loaded"], dict(theirs))
    assert results[2][1]["loaded"] == {}


def test_two_ranks_compute_what_one_does(runs):
    _, _, results = runs
    one, two = results[1][0], results[2]
    torch.testing.assert_close(torch.cat([rank["logprobs"] for rank in two]), one["logprobs"], rtol=0, atol=1e-5)
    assert without_costs(two[0]["metrics"]) == without_costs(two[1]["metrics"])
    for step in ("metrics", "second_metrics"):
        assert without_costs(two[0][step]) == pytest.approx(without_costs(one[step]), rel=1e-5, abs=1e-6)
    assert close(two[0]["after_one"], one["after_one"], 1e-5)
    assert not close(one["after_one"], one["loaded"], 1e-4), "the step moved the weights"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_restores_model_optimizer_schedule_and_random_state_exactly(runs, ranks):
    result = runs[2][ranks][0]
    assert equal(result["restored"], result["after_one"])
    assert without_costs(result["metrics_again"]) == without_costs(result["second_metrics"])
    assert equal(result["after_two_again"], result["after_two"])
    assert result["random_state_restored"]
    assert not equal(result["after_two"], result["after_one"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_from_before_the_first_step_is_exact_too(runs, ranks):
    result = runs[2][ranks][0]
    assert without_costs(result["metrics_from_start"]) == without_costs(result["metrics"])
    assert equal(result["after_one_again"], result["after_one"])


def test_two_ranks_continue_from_one_ranks_checkpoint(runs):
    one, two = runs[2][1][0], runs[2][2][0]
    assert equal(two["from_other"], one["after_one"])
    assert two["from_other_metrics"]["train/grad_norm"] == pytest.approx(
        one["second_metrics"]["train/grad_norm"], rel=1e-5
    )


def test_what_two_ranks_publish_is_byte_equal_to_what_one_does(runs):
    tied, _, results = runs
    one, two = results[1][0]["published"], results[2][0]["published"]
    assert equal(one, two)
    assert equal(one, {name: tensor.bfloat16() for name, tensor in results[1][0]["loaded"].items()})
    assert ("lm_head.weight" in one) is not tied


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_exported_directory_is_the_policy(runs, ranks):
    _, root, results = runs
    directory = root / str(ranks) / "hf"
    model = Qwen3ForCausalLM.from_pretrained(directory)
    after = results[ranks][0]["after_one"]
    theirs = model.state_dict()
    assert all(torch.equal(after[name], theirs[name]) for name in after)
    assert theirs.keys() - after.keys() <= {"lm_head.weight"}
    assert set(stored_dtypes(directory).values()) == {torch.float32}
    assert not list(root.glob(f"{ranks}/.hf*"))
