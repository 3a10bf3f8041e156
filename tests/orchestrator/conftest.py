"""Starting whole jobs on a tiny random policy."""

import pytest
from jobs import SHORT, Job


@pytest.fixture
def start_job(tmp_path, tiny_model):
    """Start a short quickstart job on the tiny random policy; whatever of it still runs at the end is killed."""
    jobs = []

    def start(*overrides: str, **options) -> Job:
        fixed = [f"model.path={tiny_model}", "model.make=null", "data.max_prompt_tokens=110"]
        jobs.append(Job([*fixed, *SHORT, *overrides], tmp_path, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
