"""Programs on several ranks of this machine, and comparing what they found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch


def run_ranks(ranks: int, arguments: list[Path | str], logs: Path, program: Path) -> None:
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


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], rtol=0, atol=relative * float(theirs[name].abs().max()))
        for name in ours
    )


def far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Distance between all tensors together, relative to their size."""
    assert ours.keys() == theirs.keys()
    total = sum(float((ours[name] - theirs[name]).double().norm() ** 2) for name in ours)
    return (total / sum(float(theirs[name].double().norm() ** 2) for name in ours)) ** 0.5
