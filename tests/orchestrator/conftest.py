"""Starting whole jobs on a tiny random policy."""

import subprocess
import sys

import pytest
from jobs import SHORT, Job

from rl_tpu.config.compose import resource


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The quickstart's policy, hardly warmed up: it writes anything, and its distributions are wide."""
    path = tmp_path_factory.mktemp("policy") / "model"
    script = resource("examples/quickstart/warmup.py")
    subprocess.run([sys.executable, str(script), "--out", str(path), "--steps", "2"], check=True, timeout=300)
    return path


@pytest.fixture
def start_job(tmp_path, tiny_model):
    """Start a short quickstart job on the tiny random policy; whatever of it still runs at the end is killed."""
    jobs = []

    def start(*overrides: str, **options) -> Job:
        fixed = [f"model.path={tiny_model}", "model.make=null"]
        jobs.append(Job([*fixed, *SHORT, *overrides], tmp_path, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
