"""What the console says of compiled programs, in whole jobs."""

from __future__ import annotations

import re

import pytest
from jobs import read_rows


@pytest.mark.slow
def test_the_second_job_says_that_it_found_programs(start_job, tmp_path):
    cache = tmp_path / "programs"
    said = []
    for name in ("first", "second"):
        run_dir = tmp_path / name
        settings = ["trainer.steps=1", "trainer.execution.mode=compile", f"trainer.execution.cache={cache}"]
        code, output = start_job(f"run_dir={run_dir}", *settings).finish(600)
        assert code == 0, output
        (counts,) = re.findall(rf"programs: (\d+) compiled, (\d+) from the cache {cache}/[0-9a-f]+\n", output)
        said.append([int(count) for count in counts])
        (row,) = read_rows(run_dir)
        assert [row["train/cache_misses"], row["train/cache_hits"]] == said[-1]
    assert said[0][0] > 0
    assert said[1][1] > 0
    assert said[1][0] < said[0][0]
